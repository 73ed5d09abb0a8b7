# syntax=docker/dockerfile:1
# The server on a GPU host:  docker build -t juice .
# On a CPU:                  docker build -t juice:cpu --build-arg BASE=ubuntu:24.04 --build-arg ENGINE=own --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
ARG BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
# vllm or own: which engine is installed for, and runs by default.
ARG ENGINE=vllm

FROM ${BASE} AS build
ARG ENGINE
# Empty: PyTorch as PyPI has it, with CUDA.
ARG TORCH_INDEX=""
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/juice
WORKDIR /src
COPY constraints.txt constraints-vllm.txt ./
RUN if [ -n "$TORCH_INDEX" ]; then \
        /opt/juice/bin/pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" torch; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY juice juice
COPY server server
COPY head_sets head_sets
RUN if [ "$ENGINE" = vllm ]; then \
        /opt/juice/bin/pip install --no-cache-dir --constraint constraints-vllm.txt vllm '.[serve]'; \
    else \
        /opt/juice/bin/pip install --no-cache-dir --constraint constraints.txt '.[serve,quant]'; \
    fi

FROM ${BASE}
ARG ENGINE
# vLLM's kernels are compiled where they run.
RUN apt-get update && apt-get install --yes --no-install-recommends python3 \
    && if [ "$ENGINE" = vllm ]; then apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev; fi \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 juice \
    && mkdir /models /head_sets && chown juice /models /head_sets
COPY --from=build /opt/juice /opt/juice
USER 10001
WORKDIR /home/juice
ENV PATH=/opt/juice/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1 JUICE_HOST=0.0.0.0 JUICE_PORT=8000 JUICE_LOG_FORMAT=json JUICE_ENGINE=${ENGINE}
VOLUME ["/models", "/head_sets"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['JUICE_PORT'] + '/readyz', timeout=4)"]
ENTRYPOINT ["juice", "serve"]
