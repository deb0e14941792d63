# Two commands, each complete on a machine with Python >= 3.11, make and a C++ compiler:
#   make demo    create the environment, then run the demo study from plan to table in demo/
#   make test    create the environment, build Horovod (once per torch; cached in ~/.cache), then run all tests
PYTHON ?= python3
VENV ?= .venv
# Test files in parallel. Many tests wait for a Slurm cluster that they booted, so two fit any machine.
JOBS ?= 2
BIN := $(abspath $(VENV))/bin

.PHONY: demo test lint env test-env clean

# Rebuild the environment when pyproject.toml changes.
env: $(VENV)/.run
$(VENV)/.run: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("orchestrate needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[torch]'
	touch $@

test-env: $(VENV)/.test
$(VENV)/.test: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.[gpipe,deepspeed]' --group test --group lint
	$(BIN)/orchestrate wheel horovod --cpu --python $(BIN)/python --install
	touch $@

demo: env
	mkdir -p demo
	cd demo && { test -e experiment.toml || $(BIN)/orchestrate init --study demo; }
	cd demo && $(BIN)/orchestrate plan --local && $(BIN)/orchestrate submit --local --wait && $(BIN)/orchestrate results

lint: test-env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: test-env lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
