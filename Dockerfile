# docker build -t vocab-parallel:0.1.0 . && docker run --rm --gpus all --shm-size 8g vocab-parallel:0.1.0
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# The C compiler and headers are for kernels that Triton and torch.compile build at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /vocab-parallel

# What set-up reads, before the sources: a change of the sources then keeps this layer, which is the large one.
COPY pyproject.toml LICENSE README.md ./
COPY requirements requirements
COPY scripts scripts
COPY vocab_parallel/__init__.py vocab_parallel/__init__.py
RUN bash -euo pipefail -c '. scripts/lib.sh && setup dev' && rm -rf /root/.cache

COPY . .
ENV PATH=/vocab-parallel/.venv/bin:$PATH
CMD ["scripts/quickstart"]
