# The image of every host of a multi-node job.
#
#     docker build -t lomdm .
#     docker run --gpus all --ipc host --network host --ulimit memlock=-1 \
#         -v ~/.ssh/lomdm:/home/lomdm/.ssh -v /shared/data:/workspace/lomdm_dist/data \
#         -v /shared/runs:/workspace/lomdm_dist/runs lomdm launchers/sshd.sh
#
# on every host, with a key pair, `authorized_keys` among it, in ~/.ssh/lomdm; then launchers/deepspeed.sh
# in the container of the first. --ulimit and --ipc are for NCCL, --network for its speed.
FROM nvcr.io/nvidia/pytorch:25.09-py3

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# the versions are those of the base image's Ubuntu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server pdsh \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*

WORKDIR /workspace/lomdm_dist
COPY constraints.txt setup.py README.md ./
COPY lomdm_dist lomdm_dist

# NVIDIA's torch, numpy and what was built against them stay: what the image has is a constraint, and
# constraints.txt holds for the rest. DeepSpeed looks for torch when it is built, so without isolation.
RUN pip list --format=freeze >/tmp/image.txt \
    && awk -F== 'function key(name) { name = tolower(name); gsub(/[-_.]+/, "-", name); return name } \
        NR == FNR { has[key($1)]; print; next } !/^#/ && !(key($1) in has)' \
        /tmp/image.txt constraints.txt >/tmp/constraints.txt \
    && DS_BUILD_OPS=0 PIP_CONSTRAINT=/tmp/constraints.txt \
        pip install --no-cache-dir --no-build-isolation --editable '.[wandb]' 'datasets>=4' \
    && rm /tmp/image.txt /tmp/constraints.txt

# Between the containers ssh finds the sshd of launchers/sshd.sh, whose key is another at each start.
# Who could stand between could read NCCL's traffic too: the network must be your own.
RUN printf 'Host *\n  Port 2222\n  StrictHostKeyChecking accept-new\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n  ServerAliveInterval 10\n  ServerAliveCountMax 3\n' \
        >/etc/ssh/ssh_config.d/lomdm.conf \
    && useradd --no-log-init --uid 1001 --create-home --shell /bin/bash --password '*' lomdm \
    && chown lomdm /workspace/lomdm_dist
ENV PDSH_RCMD_TYPE=ssh

COPY --chown=1001 . .
USER 1001
EXPOSE 2222
