# Two commands matter to a newcomer: `make demo` and `make test`. Both build .venv first when it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Exactly what a lock names, each file checked against its hash; then flopwise itself, from here.
INSTALL := $(PIP) install --require-hashes --no-deps -r
EDITABLE := $(PIP) install --no-deps --no-build-isolation -e .

# Quick files, at least one of each room that has any.
TINY := $(addprefix tests/,base/test_units.py work/test_bytes.py setup/test_parallel.py setup/test_schedules.py \
	store/test_statistics.py predict/test_step.py plan/test_levels.py profile/test_verdicts.py profile/test_intervals.py \
	engine/test_arena.py report/test_cap_grids.py train/test_commit.py sweep/test_sweep_grid.py cli/test_cli_runs.py)

# Neighbours stay together, since they share what was set up for them; who has nothing left takes from the other.
SPREAD := -n 2 --dist worksteal

# Tests start hundreds of processes: none of them compiles again what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check tiny format bench pictures fuzz lock clean help
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

# What tests skip without, once, where this may be installed; where it cannot be, the tests say at their end what is missing.
SYSTEM := chromium slurm-wlm munge
$(VENV)/.system: $(VENV)/.created
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing $(SYSTEM)"; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SYSTEM) >$(VENV)/system.log 2>&1 \
			&& touch $@ || echo "apt-get could not install $(SYSTEM) ($(VENV)/system.log): going on without"; \
	fi

demo: $(VENV)/.train  ## predictions, plans, a small model trained and profiled here, a sweep, its table and its page
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.dev $(VENV)/.system  ## every test, on two processes; as root on Debian installs Chromium and Slurm for them
	$(BIN)/python -m pytest $(SPREAD)

check: $(VENV)/.dev  ## format, lint, types, import rules, quick tests: passes on every commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest $(SPREAD) -m "not slow" -q

tiny: $(VENV)/.dev  ## a few quick tests of most rooms, in under 20 s
	$(BIN)/python -m pytest $(SPREAD) -m "not slow" -q $(TINY)

format: $(VENV)/.dev  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.base  ## errors on published kernels and measured steps, speed of the predictor
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.steps
	$(BIN)/python -m benchmarks.mpt_table
	$(BIN)/python -m benchmarks.speed

pictures: $(VENV)/.dev $(VENV)/.system  ## docs/page-*.png: the page as it is now, looked at by Chromium
	$(BIN)/python -m benchmarks.pictures

fuzz: $(VENV)/.dev  ## damaged files and words through the command line, for MINUTES (5); what it finds becomes a test
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5)

lock: $(VENV)/.created  ## pin again what `make` installs, with hashes; UPGRADE="numpy rich" or UPGRADE=all raises pins
	$(PIP) install uv
	PATH="$(CURDIR)/$(BIN):$$PATH" locks/refresh

clean:  ## remove what the targets above made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
