#!/usr/bin/env bash
# Train on the hosts of a hostfile, over ssh: run it on the first of them, in the project's folder.
#
#     HOSTFILE=hostfile CONFIG=configs/1b.yaml launchers/deepspeed.sh [section.key=value ...]
#
# Checks the hosts, then trains, and starts again up to RESTARTS (10) times a day after a fault. Stop it
# with Ctrl-C, SIGTERM or SIGUSR1: all ranks save, and it ends with 75. DeepSpeed kills ranks that have not
# saved in 30 s; `touch RUN/stop`, RUN being train.run, gives them the time that they need.
#
# Of this shell's variables DeepSpeed hands on to the other hosts those that begin with NCCL, PYTHON, MV2,
# UCX and MLFLOW, and nothing else: HF_HOME, WANDB_MODE, GLOO_SOCKET_IFNAME, OMP_NUM_THREADS and the like
# belong into ./.deepspeed_env or ~/.deepspeed_env, NAME=VALUE a line, without blank lines. It prints all
# it hands on, and puts it on command lines, so no keys and no tokens there: keep those in files of each
# host (~/.netrc for wandb). An override with a quote, $ or ; meets a second shell on the other hosts:
# put such values into the config.
set -euo pipefail

HOSTFILE=${HOSTFILE:-hostfile}
CONFIG=${CONFIG:-configs/1b.yaml}
PORT=${PORT:-29500}
# a host that is gone ends its ssh after 30 s; without this pdsh waits for it for hours
export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} -o ServerAliveInterval=10 -o ServerAliveCountMax=3"

lomdm launch --check --hostfile "$HOSTFILE" --config "$CONFIG" --port "$PORT" "$@"
exec lomdm launch --restarts "${RESTARTS:-10}" \
    deepspeed --hostfile "$HOSTFILE" --master_port "$PORT" \
    train.py --config "$CONFIG" --resume auto "$@"
