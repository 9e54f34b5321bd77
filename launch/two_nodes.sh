#!/usr/bin/env bash
# The same line on each of NNODES machines, without Slurm or Kubernetes; HOST is the address of any one of them:
# HOST=10.0.0.1 NPROC=8 launch/two_nodes.sh train configs/quickstart.yaml [overrides ...]
set -euo pipefail

PATH=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin:$PATH
export PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC:-8}" --max-restarts "${RESTARTS:-0}" --rdzv-backend c10d \
  --rdzv-endpoint "$HOST:${PORT:-29500}" --rdzv-id "${JOB:-vocab-parallel}" ${ADDRESS:+--local-addr "$ADDRESS"} \
  -m vocab_parallel "$@"
