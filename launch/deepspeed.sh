#!/usr/bin/env bash
# NPROC ranks in DeepSpeed: NPROC=4 launch/deepspeed.sh CONFIG host_config=configs/deepspeed/zero3.json [overrides ...]
set -euo pipefail

PATH=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin:$PATH
# DeepSpeed 0.19 uses names of collectives that torch 2.13 warns of, once a call.
export PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore::FutureWarning:torch.distributed.c10d_logger

exec torchrun --standalone --nproc-per-node "${NPROC:-2}" --max-restarts "${RESTARTS:-0}" \
  -m vocab_parallel train --host deepspeed "$@"
