#!/usr/bin/env bash
# NPROC ranks of a Llama from Transformers: NPROC=4 launch/transformers.sh CONFIG [overrides ...]
set -euo pipefail

PATH=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin:$PATH
export PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false

exec torchrun --standalone --nproc-per-node "${NPROC:-2}" --max-restarts "${RESTARTS:-0}" \
  -m vocab_parallel train --host transformers "$@"
