# Everything runs in .venv, which is made on first use and left alone while the files that define it are unchanged.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Two processes, each with one thread, are quicker than one process on two cores.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal
# In CI the output ends with the coverage of each file.
COVERAGE := $(if $(CI),--cov --cov-report=term)

MINUTES ?= 10

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/protosteer/__init__.py)

.PHONY: help setup demo test test-fast test-ray lint docs bench fuzz image clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(STAMP)  ## create .venv and install the package with its development tools

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv (once; a few minutes) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup  ## learn digits and photographs task after task, and show what is forgotten
	@$(BIN)/protosteer demo

test: lint  ## lint, type-check and run every test
	@$(PYTEST) $(COVERAGE)

test-fast: setup  ## run the unit tests alone
	@$(PYTEST) -m "not slow"

test-ray: setup  ## run the tests that start Ray's workers
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@PROTOSTEER_RAY=1 $(BIN)/python -m pytest -q tests/cli/test_cli_ray.py

lint: setup  ## check style, types, the order of imports, spelling and wording
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/codespell
	@$(BIN)/python tools/prose.py

docs: setup  ## build the documentation site into site/; no network is needed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: setup  ## measure speed as ratios within one run
	@$(BIN)/protosteer bench

fuzz: setup  ## try mutated files for MINUTES=10, and keep each that fails
	@$(BIN)/python tools/fuzz.py --minutes $(MINUTES)

image:  ## build the container image, where docker runs
	docker build -t protosteer:$(VERSION) .
	docker run --rm protosteer:$(VERSION) --version

clean:  ## remove everything that can be made again
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist site protosteer-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
