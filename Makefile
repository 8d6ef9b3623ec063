# `make demo` and `make test` work in a new clone: they create .venv and install what they need.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
# -P keeps the repository root off sys.path, where kernels/ would shadow the package `kernels` of Hugging Face.
PY := $(BIN)/python -P
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Files that codespell checks: text and code, but not data.
PROSE := *.md docs scripts examples $(shell git ls-files 'src/foreshock/*.py' 'src/foreshock/*.md')

# Tests start hundreds of processes; with this variable, each of them would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: site help demo demo-train test test-full faults-long mutants check check-types check-rest format docs servers clean

help: ## list the targets
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

demo: .venv/.server ## replay recorded failures next to a switched run on the live page (two minutes, no PyTorch)
	@$(PY) -m foreshock demo $(ARGS)

demo-train: .venv/.demo ## train a small GPT on this machine until it drifts (PyTorch; five minutes)
	@$(PY) -m foreshock demo --train $(ARGS)

servers: ## install Prometheus, Alertmanager, PostgreSQL and Chromium for the tests, from Debian's packages
	@scripts/install-servers

# One thread per process, because more threads would compete for the cores. Three processes on two cores, because many
# tests wait for a service (6 minutes 45 seconds instead of 8 minutes).
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest
WORKERS ?= 3
# pytest exits with 5 if it selects no test, which one of the two calls may do with ARGS.
OR_NONE = $(if $(ARGS),|| test $$? = 5)

test: .venv/.dev servers ## run the tests, with real servers, except slow ones
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m "not serial" $(ARGS) $(OR_NONE)
	@$(PYTEST) -m serial $(ARGS) $(OR_NONE)

test-full: .venv/.dev servers ## run the slow tests: kernels in Triton's interpreter, the whole demo, end-to-end tests
	@$(PYTEST) --tier full -n $(WORKERS) --dist loadfile -m "full and not serial" $(ARGS) $(OR_NONE)
	@$(PYTEST) --tier full -m "full and serial" $(ARGS) $(OR_NONE)

faults-long: .venv/.dev servers ## run the crash, fuzz and soak tests at the promised sizes; takes hours
	@$(PY) -m pytest tests/faults tests/server --tier long $(ARGS)

mutants: .venv/.dev servers ## mutation tests: check that tests detect the changes in tests/mutants.toml; takes an hour
	@$(PY) scripts/run_mutants.py $(ARGS)

check: .venv/.dev ## check format, lint, types, import contracts, generated files, spelling and documentation
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check-types check-rest

check-types: .venv/.dev # takes longest, so it starts first
	@$(BIN)/mypy

check-rest: .venv/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports
	@$(PY) scripts/generate_docs.py --check
	@$(BIN)/codespell $(PROSE)
	@$(PY) scripts/check_prose.py
	@$(MAKE) --no-print-directory site

format: .venv/.dev ## format the code, and fix lint errors that can be fixed automatically
	@$(BIN)/ruff check --fix --exit-zero --quiet . && $(BIN)/ruff format .

docs: .venv/.dev ## generate the reference pages, boards and rules from the code
	@$(PY) scripts/generate_docs.py

site: .venv/.dev ## build the documentation in build/site/index.html, with warnings as errors; works offline
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --doctree-dir build/doctrees docs build/site

clean: ## remove build files and caches
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
