# The commands of the project. `make setup` is done by the others where it is needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PORT ?= 8000

.PHONY: setup run test lint bench

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

run: $(STAMP)
	$(BIN)/juice serve --model mini --port $(PORT)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

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
