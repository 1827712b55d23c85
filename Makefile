# `make` lists the targets. Another Python: make PYTHON=python3.12 test
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
RUNS := .venv/.installed
DEVELOPS := .venv/.installed-dev

# Tests that need a browser or a GPU run where there is one; the slow ones are a stage of .ci/run.
BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
GPU := $(shell command -v nvidia-smi)
MARKERS := not slow$(if $(BROWSER),, and not browser)$(if $(GPU),, and not gpu)

.DEFAULT_GOAL := help
.PHONY: help demo test bench lint format clean

# make bench CASES=tiny,mid STEPS=5 JSON=result.json
CASES ?= tiny,mid,image_heavy,frozen,frozen_cached,lora,many,long
STEPS ?= 5
JSON ?=

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(RUNS)  ## Train a tiny vision-language model on rendered scenes (CPU, a few minutes)
	$(BIN)/fovea train recipes/shapes.yaml 'run_dir=runs/demo-{time}'

test: $(DEVELOPS)  ## Run the tests
	$(BIN)/python -m pytest -m "$(MARKERS)"

bench: .venv-bench/.installed  ## Compare with TRL's GRPOTrainer, step by step (CASES=, STEPS=, JSON=)
	.venv-bench/bin/python -m benchmarks.vs_trl --cases $(CASES) --steps $(STEPS) $(if $(JSON),--json $(JSON))

lint: $(DEVELOPS)  ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEVELOPS)  ## Rewrite files in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:  ## Remove caches and builds (not .venv, not runs)
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find fovea tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Each is made once, and again when what it holds may have changed. pip and not uv, so that pip's own settings (local
# wheels, mirrors) count; not quiet, because torch takes minutes to download.
$(RUNS): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into .venv what a run needs, mostly torch; the README says how to get it without CUDA"
	$(PIP) -e .
	@touch $@

$(DEVELOPS): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into .venv what tests and linters need as well"
	$(PIP) -e '.[dev]'
	@touch $(RUNS) $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Fovea needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -f $(BIN)/python; echo "no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }

.venv-bench/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@
