# Two commands matter to a newcomer: `make demo` and `make test`. Both build .venv first when it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Exactly what a lock names, each file checked against its hash; then flopwise itself, from here.
INSTALL := $(PIP) install --require-hashes --no-deps -r
EDITABLE := $(PIP) install --no-deps --no-build-isolation -e .

.PHONY: demo test check format bench fuzz lock clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flopwise needs Python 3.11 or later; hint: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.base: $(VENV)/.created pyproject.toml locks/base.txt
	$(INSTALL) locks/base.txt
	$(EDITABLE)
	touch $@

# torch's CPU build where pip is shown one (an index or a folder of its own), else that of PyPI with its gigabytes of CUDA.
$(VENV)/.train: $(VENV)/.base locks/train.txt locks/torch-cpu.txt locks/torch-cuda.txt
	$(INSTALL) locks/train.txt
	$(INSTALL) locks/torch-cpu.txt 2>$(VENV)/torch-cpu.log || grep -q "No matching distribution" $(VENV)/torch-cpu.log || { cat $(VENV)/torch-cpu.log; false; }
	$(BIN)/python -c 'import importlib.metadata as found; found.version("torch")' 2>/dev/null || $(INSTALL) locks/torch-cuda.txt
	touch $@

$(VENV)/.dev: $(VENV)/.train locks/dev.txt
	$(INSTALL) locks/dev.txt
	$(PIP) check
	touch $@

demo: $(VENV)/.train  ## predictions, plans, a small model trained and profiled here, a sweep, its table and its page
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.dev  ## every test, on two processes
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.dev  ## format, lint, types, import rules, quick tests: passes on every commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 -m "not slow" -q

format: $(VENV)/.dev  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.base  ## errors on published kernels and measured steps, speed of the predictor
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.steps
	$(BIN)/python -m benchmarks.mpt_table
	$(BIN)/python -m benchmarks.speed

fuzz: $(VENV)/.dev  ## damaged files and words through the command line, for MINUTES (5); what it finds becomes a test
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5)

lock: $(VENV)/.created  ## pin again what `make` installs, with hashes; UPGRADE="numpy rich" or UPGRADE=all raises pins
	$(PIP) install uv
	PATH="$(CURDIR)/$(BIN):$$PATH" locks/refresh

clean:  ## remove what the targets above made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
