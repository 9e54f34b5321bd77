#!/usr/bin/env bash
# One machine, NPROC ranks (2 if unset): NPROC=4 launch/local.sh train configs/quickstart.yaml [overrides ...]
# With restarts after a rank has died, from its last checkpoint: RESTARTS=5 launch/local.sh train CONFIG run=runs/mine
set -euo pipefail

PATH=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin:$PATH
export PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun --standalone --nproc-per-node "${NPROC:-2}" --max-restarts "${RESTARTS:-0}" -m vocab_parallel "$@"
