# Each target sets up what it needs. An environment of your own: make test VENV=/path/to/venv
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.optexp-installed
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? 2 : n > 8 ? 8 : n)))  # of the tests
# Bytecode is kept, whatever the caller prefers: tests start hundreds of processes, which would compile all files anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all test-gpu doctor benchmark benchmark-kernels docs clean

help:  ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

env: $(STAMP)  ## create the environment, with the versions of constraints.txt

demo: env  ## run the main job on this machine and say where to look
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		job='workload=mlp strategy=cuda_graph'; \
	else \
		job='workload=gelu strategy=fusion measurement=quick'; \
	fi; \
	echo "python -m optexp $$job"; \
	$(PY) -m optexp $$job && \
	echo && echo "All runs side by side: $(PY) -m optexp.ui"

test: env  ## lint, types, and all quick tests that need no GPU
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest -m 'not gpu and not slow' -n $(WORKERS) --dist worksteal  # kernels: interpreted

test-all: env  ## all tests, the slow ones too (an hour)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal

test-gpu: env  ## the tests that need a GPU
	$(PY) -m pytest -m gpu

doctor: env  ## is this machine fit to measure on?
	$(PY) -m optexp.doctor

benchmark: env  ## time to verdict of the main job, and where it goes
	$(PY) tests/benchmarks/time_to_verdict.py

benchmark-kernels: env  ## our kernels beside what they must beat, on this GPU, and their result page
	$(PY) -m optexp.benchmark --compile default --plots --record experiments/results/data

docs: env  ## the documentation site, in build/site; a broken link fails it
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

clean:  ## remove results, caches and the environment made here; the MLflow store stays
	rm -rf .venv build dist outputs multirun .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "optexp needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Python compiles what it imports; pip would compile every file, for a minute.
$(STAMP): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install --no-compile --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@
