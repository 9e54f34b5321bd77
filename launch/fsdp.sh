#!/usr/bin/env bash
# NPROC ranks under FSDP2: NPROC=4 launch/fsdp.sh CONFIG parallel.tp=2 [overrides ...]
set -euo pipefail

PATH=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin:$PATH
export PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun --standalone --nproc-per-node "${NPROC:-2}" --max-restarts "${RESTARTS:-0}" \
  -m vocab_parallel train --host fsdp "$@"
