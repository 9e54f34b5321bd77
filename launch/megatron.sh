#!/usr/bin/env bash
# NPROC ranks of a GPTModel from Megatron-core, which needs CUDA: NPROC=8 launch/megatron.sh CONFIG [overrides ...]
set -euo pipefail

PATH=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin:$PATH
export PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=1

exec torchrun --standalone --nproc-per-node "${NPROC:-2}" --max-restarts "${RESTARTS:-0}" \
  -m vocab_parallel train --host megatron "$@"
