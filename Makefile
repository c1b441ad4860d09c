# Every target makes its own .venv first; a machine needs only Python 3.11 or newer with pip.
PYTHON ?= python3
# Options for pip. Without a GPU, naming torch's index of CPU wheels here saves several GB of CUDA libraries.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread per process: the tests that need several cores start several ranks. Two processes take half the time of
# one on two cores; JOBS=0 runs everything in one.
JOBS ?= 2
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu check bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "lit-pretrain needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "==> Creating $(VENV) and installing the pinned packages into it (once; torch is the largest)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## Pretrain a small GPT on text of this machine, then let it write
	@if [ -e outputs/demo ]; then old=outputs/demo-$$(date +%Y%m%d-%H%M%S); \
	  echo "==> Keeping the earlier demo as $$old"; mv outputs/demo $$old; fi
	@echo "==> Training: lit-pretrain train experiment=demo run_id=demo"
	@$(BIN)/lit-pretrain train experiment=demo run_id=demo
	@echo "==> Sampling: lit-pretrain generate run=outputs/demo"
	@$(BIN)/lit-pretrain generate run=outputs/demo
	@echo "==> Second act: poisoned data, left alone and rolled back (a minute or two)"
	@rm -rf outputs/demo-spike
	@GOMP_SPINCOUNT=1000 $(BIN)/python examples/spike_demo.py --out outputs/demo-spike

test: check  ## Checks and the fast tests
	@echo "==> Fast tests"
	@$(TEST) -n $(JOBS) --dist worksteal -m "not slow and not gpu"

test-slow: $(STAMP)  ## Whole runs and large matrices
	@echo "==> Slow tests"
	@$(TEST) -n $(JOBS) --dist worksteal -m "slow and not gpu"

test-gpu: $(STAMP)  ## Tests that need a CUDA device
	@echo "==> Tests on a GPU"
	@$(TEST) -m gpu

check: $(STAMP)  ## Format, lint, types, floors
	@echo "==> Format"
	@$(BIN)/ruff format --check .
	@echo "==> Lint"
	@$(BIN)/ruff check .
	@echo "==> Types"
	@$(BIN)/mypy
	@echo "==> Floors"
	@$(BIN)/lint-imports --no-logo

bench: $(STAMP)  ## Compare speed with plain Lightning, plain PyTorch and transformers
	@echo "==> Benchmarks"
	@$(BIN)/python -m benchmarks

clean:  ## Remove the virtual environment, caches and build output; runs in outputs/ stay
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './outputs/*' -prune -exec rm -rf {} +
