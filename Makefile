# Two commands matter to a newcomer: `make demo` and `make test`. Both build .venv first when it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check format bench clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flopwise needs Python 3.11 or later; hint: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.base: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e .
	touch $@

$(VENV)/.train: $(VENV)/.base
	$(INSTALL) --no-build-isolation -e '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(INSTALL) --no-build-isolation -e '.[dev,train]'
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

clean:  ## remove what the targets above made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
