#!/usr/bin/env bash
# Train with torchrun: run it on every host, in any order, with the same HOST, PORT and NNODES.
#
#     HOST=node0 PORT=29400 NNODES=4 launchers/torchrun.sh --config configs/1b.yaml [section.key=value ...]
#
# HOST is one of the hosts, which all reach. NNODES=2:4 trains on as many of 2 to 4 hosts as have come, and
# goes on with another number when one comes or goes; train.global_batch must be a multiple of the ranks of
# each number, times train.micro_batch. When a worker fails, torchrun starts all again from the last
# checkpoint, RESTARTS (3) times. It knows no exit statuses: a mistake is tried again as well. Stop it on
# every host, each ends with 75 when all ranks have saved; or by `touch RUN/stop`, then each ends with 0.
set -euo pipefail

# to save, after a stop; torch's own 30 s are few for a large model
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# hosts may come 20 minutes apart, and are waited for another minute once the least number is there; one
# that has not been heard of for 3 x 10 s is gone (their clocks must agree to that)
conf=join_timeout=1200,last_call_timeout=60,keep_alive_interval=10,keep_alive_max_attempt=3

# `lomdm launch` restarts nothing here: it makes of a stop status 75, whatever torchrun makes of it
exec lomdm launch --restarts 0 \
    torchrun --nnodes "${NNODES:-1}" --nproc-per-node "${GPUS:-gpu}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "${HOST:-localhost}:${PORT:-29400}" --rdzv-id lomdm \
    --rdzv-conf "$conf" train.py --resume auto "$@"
