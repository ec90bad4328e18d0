# The documented commands. Each sets up what it needs first: a virtual environment in .venv with this package and its
# tools. Settings: PYTHON (interpreter to start from), DEMO_ARGS, PYTEST_ARGS, FUZZ_ARGS, MUTANTS_ARGS, BENCH_ARGS,
# GPU_ARGS.

PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
FUZZ_ARGS ?=
MUTANTS_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup references demo test fuzz mutants check bench gpu clean

VENV := .venv
STAMP := $(VENV)/installed
TYPING := build/typing
# where PyTorch publishes builds without CUDA
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
PINS := $(VENV)/constraints.txt
TORCH_BLOCK := /^\# torch and/,/^\# end of/

help: ## List the commands.
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install; the other commands do this by themselves.

references: $(STAMP) ## Install implementations that are not ours, for the tests that compare networks with them.
	@$(PIP) install --no-deps --upgrade --target $(VENV)/references -r tests/references.txt

demo: $(STAMP) ## Three drafters write, then a table; a minute. DEMO_ARGS="--model smollm2" has a chat model, --all all drafters.
	@$(VENV)/bin/specdec demo $(DEMO_ARGS)

# The tests are the same everywhere: kernels run in Triton's interpreter. Those that need a GPU follow where there is one.
test: $(STAMP) ## Run the tests; those that need a GPU are skipped without one.
	@OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(VENV)/bin/pytest -n auto --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)
	@! command -v nvidia-smi >/dev/null || $(VENV)/bin/pytest -m gpu $(PYTEST_ARGS)

fuzz: $(STAMP) ## Make 10,000 random calls of generate; FUZZ_ARGS gives --first-seed and --num-calls.
	@PYTHONPATH=tests $(VENV)/bin/python -m lib.fuzz $(FUZZ_ARGS)

mutants: $(STAMP) ## Plant faults all over the library and see its tests fail; MUTANTS_ARGS gives names of some.
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(VENV)/bin/python -m lib.mutants $(MUTANTS_ARGS)

check: $(STAMP) ## Lint, format, types, spelling, architecture.
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@# The four folders form one package only once installed, and mypy does not follow an editable install.
	@rm -rf $(TYPING) && mkdir -p $(TYPING)/specdec
	@ln -s $(CURDIR)/specdec/* $(CURDIR)/kernels $(CURDIR)/models $(CURDIR)/bench $(TYPING)/specdec/
	@cd $(TYPING) && $(CURDIR)/$(VENV)/bin/mypy -p specdec \
		--config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache | sed -E 's#^specdec/(kernels|models|bench)/#\1/#'
	@$(VENV)/bin/codespell
	@$(VENV)/bin/pytest tests/test_architecture.py

bench: $(STAMP) ## Time every kernel; BENCH_ARGS goes to pytest-benchmark.
	@$(VENV)/bin/pytest bench/kernels --benchmark-only $(BENCH_ARGS)

gpu: $(STAMP) ## Measure a GPU machine in calls of nine minutes that resume; GPU_ARGS="--dry" rehearses it on a CPU.
	@$(VENV)/bin/python -m specdec.bench.on_gpu $(GPU_ARGS)

clean: ## Remove .venv, build outputs and caches.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An installed pair of torch and triton is kept, and the venv then sees the interpreter's own packages; the tools go into
# the venv all the same, since it runs them from its bin folder. Without such a pair, a machine with an NVIDIA driver
# gets the CUDA build and the Triton that torch's own release names; any other gets the pinned, far smaller CPU build.
$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; some minutes where torch must be downloaded) ..."
	@if $(PYTHON) -c 'import sys, torch, triton; sys.exit(sys.prefix != sys.base_prefix)' 2>/dev/null; then \
		$(PYTHON) -m venv --clear --system-site-packages $(VENV); \
		sed '$(TORCH_BLOCK)d' constraints.txt > $(PINS); \
		$(PIP) install --ignore-installed -c $(PINS) pytest ruff mypy codespell; \
	elif command -v nvidia-smi >/dev/null; then \
		$(PYTHON) -m venv --clear $(VENV); \
		sed '$(TORCH_BLOCK)d' constraints.txt > $(PINS); \
	else \
		$(PYTHON) -m venv --clear $(VENV); \
		cp constraints.txt $(PINS); \
		torch=$$(grep '^torch==' $(PINS))+cpu; \
		$(PIP) install -c $(PINS) "$$torch" 2>/dev/null \
			|| $(PIP) install -c $(PINS) --extra-index-url $(TORCH_CPU_INDEX) "$$torch"; \
	fi
	@$(PIP) install -c $(PINS) 'setuptools>=77'
	@$(PIP) install -c $(PINS) --no-build-isolation -e '.[dev]'
	@touch $@
