# `make train` and `make test` do their own set-up. PYTHON: any of 3.11 to 3.13; each has an environment of its own
# in `make test-all`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test test-all lint clean

train: $(VENV)/core
	$(BIN)/python train.py

test: $(VENV)/dev lint
	$(BIN)/python -m pytest -m "not slow" -n auto

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The long sweeps too, on every supported Python that is installed.
PYTHONS ?= python3.11 python3.12 python3.13
test-all:
	for python in $(PYTHONS); do \
	  if $$python --version >/dev/null 2>&1; then \
	    venv=.venv-$$(basename $$python); \
	    $(MAKE) VENV=$$venv PYTHON=$$python $$venv/dev && $$venv/bin/python -m pytest -n auto || exit 1; \
	  fi; \
	done

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxpar needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/core: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@ $(VENV)/core

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache
