#!/usr/bin/env bash
# In the container of each host: an sshd on port 2222 that needs no root, for launchers/deepspeed.sh.
# Its host key is made here and lives as long as the container; only keys in ~/.ssh/authorized_keys get in.
set -euo pipefail

keys=$(mktemp -d)
ssh-keygen -q -t ed25519 -N '' -f "$keys/host"

# a session has none of the container's variables by itself; CUDA's libraries are found by these
exec /usr/sbin/sshd -D -e -f /dev/null -p 2222 \
    -o HostKey="$keys/host" -o PidFile=none -o UsePAM=no \
    -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o AllowUsers="$(id -un)" \
    -o "SetEnv=PATH=$PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}"
