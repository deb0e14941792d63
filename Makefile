# Two set-up commands, each complete on a machine that has Python >= 3.11, make and a compiler:
#   make demo    an environment, then the demo study from plan to table in demo/
#   make test    an environment, Horovod (built once for a torch and kept in ~/.cache), then all tests
PYTHON ?= python3
VENV ?= .venv
# Test files at a time: many of them wait for a Slurm that they booted, so two suit any machine.
JOBS ?= 2
BIN := $(abspath $(VENV))/bin

.PHONY: demo test lint env test-env clean

# The environment is rebuilt when pyproject.toml changes.
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
