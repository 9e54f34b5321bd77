#!/usr/bin/env bash
# One machine, NPROC ranks (2 if unset): NPROC=4 launch/local.sh train configs/quickstart.yaml [overrides ...]
set -euo pipefail

PATH=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin:$PATH
export PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun --standalone --nproc-per-node "${NPROC:-2}" -m vocab_parallel "$@"
