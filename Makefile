# `make demo` and `make test` do all their own set-up from a bare clone.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
# -P: with the repository root on the path our kernels/ would shadow Hugging Face's package `kernels`.
PY := $(BIN)/python -P
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# What codespell reads: words of people, not data.
PROSE := *.md docs scripts examples $(shell git ls-files 'src/foreshock/*.py' 'src/foreshock/*.md')

# Tests start hundreds of processes; where this is set, each of them compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: site help demo demo-train test test-full faults-long mutants check check-types check-rest format docs servers clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"foreshock needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Name another: make PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv || { echo "python3 has no venv module; on Debian: apt-get install python3-venv"; exit 1; }

.venv/.server: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing foreshock[server] into .venv (a minute)"
	@$(INSTALL) --editable '.[server]'
	@touch $@

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing foreshock[demo] into .venv (PyTorch is the large part; a few minutes)"
	@$(INSTALL) --editable '.[demo]'
	@touch $@ .venv/.server

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing foreshock[dev] into .venv (PyTorch is the large part; a few minutes)"
	@$(INSTALL) --editable '.[dev]'
	@touch $@ .venv/.demo .venv/.server

demo: .venv/.server ## recorded failures beside the run that was switched, played on the live page (two minutes, no PyTorch)
	@$(PY) -m foreshock demo $(ARGS)

demo-train: .venv/.demo ## the same kind of drift in a small GPT that is trained here (PyTorch; five minutes)
	@$(PY) -m foreshock demo --train $(ARGS)

servers: ## Prometheus, Alertmanager, PostgreSQL and Chromium for the tests, from Debian's packages
	@scripts/install-servers

# One thread a process: more would wait for each other's cores. One process more than two cores: many tests wait for
# a service (6 minutes 45 seconds in place of 8 minutes).
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest
WORKERS ?= 3
# ARGS may name tests of which one of the two calls runs none.
OR_NONE = $(if $(ARGS),|| test $$? = 5)

test: .venv/.dev servers ## the tests, with the real servers, but for those that take long
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m "not alone" $(ARGS) $(OR_NONE)
	@$(PYTEST) -m alone $(ARGS) $(OR_NONE)

test-full: .venv/.dev servers ## the tests that `test` leaves out: kernels in the interpreter, the whole demo, from end to end
	@$(PYTEST) --tier full -n $(WORKERS) --dist loadfile -m "full and not alone" $(ARGS) $(OR_NONE)
	@$(PYTEST) --tier full -m "full and alone" $(ARGS) $(OR_NONE)

faults-long: .venv/.dev servers ## kills, fuzz and soak at the promised sizes; hours
	@$(PY) -m pytest tests/faults tests/server --tier long $(ARGS)

mutants: .venv/.dev servers ## changes of the rules that the tests have to notice (tests/mutants.toml); an hour
	@$(PY) scripts/run_mutants.py $(ARGS)

check: .venv/.dev ## formatter, linter, strict types, import contracts, generated files
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check-types check-rest

check-types: .venv/.dev # most of the time
	@$(BIN)/mypy

check-rest: .venv/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports
	@$(PY) scripts/generate_docs.py --check
	@$(BIN)/codespell $(PROSE)
	@$(PY) scripts/check_prose.py
	@$(MAKE) --no-print-directory site

format: .venv/.dev ## let the formatter write
	@$(BIN)/ruff check --fix --exit-zero --quiet . && $(BIN)/ruff format .

docs: .venv/.dev ## the reference pages, boards and rules that are made from the code
	@$(PY) scripts/generate_docs.py

site: .venv/.dev ## the documentation, strict, in build/site/index.html; it needs no network
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --doctree-dir build/doctrees docs build/site

clean: ## remove what the build made
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
