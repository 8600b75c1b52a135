# make demo                 set up, then the main job on this machine: a watched fine-tune, with Prometheus and alerts
# make demo FAULT=nan       the same, broken for real: nan, stall, kill, oom or disk_full
# make test                 set up, then the tests
# make test-all             the tests that take long, too
# make lint, make bench     style and types; benchmarks and mutation of the rules

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On Linux, PyPI's torch is the CUDA build of several gigabytes. For the CPU build:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
FAULT ?=
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-all lint bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[train,dev]'
	touch $@

# Prometheus and Alertmanager: from PATH, or unpacked beside the venv without root.
$(VENV)/.tools: $(VENV)/.ready
	$(BIN)/python -m tunewatch.binaries
	touch $@

demo: $(VENV)/.tools
	$(BIN)/tunewatch demo $(if $(FAULT),--fault $(FAULT))

test: $(VENV)/.tools
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: $(VENV)/.tools
	TUNEWATCH_SEQUENCES=10000 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.tools
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
