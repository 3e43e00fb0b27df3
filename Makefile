# Everything sets up its own virtual environment, once, from the hashed lock files in requirements/.
#   make VENV=/some/where ...    another place for it
#   make PYTHON=python3.12 ...   another interpreter (3.11 or newer)
#   make test ARGS="-k prefix"   more arguments for the tool behind a target

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
ARGS ?=
# One more than cores: a third of the time of tests is spent in waits.
TESTERS ?= 3
BIN := $(VENV)/bin
# By file: broker and Spark session serve all tests of a process, and fixtures of a module begin once. In the order of
# tests/durations.json, not by number of tests: the longest files first.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Modules are compiled when they are first imported: most never are, and all would take longer than the rest.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-compile
WHEEL := $(BIN)/python -m pip wheel --disable-pip-version-check --no-build-isolation --quiet --no-deps --wheel-dir dist
# Tests of what decides. Those that wait for threads and processes are about these; two others run whole sources through
# many restarts, which takes a minute when it is traced, and no branch that is not taken without them.
OF_CORE = $$(grep -rlE --include='test_*.py' '^from streams\.core' tests/unit tests/property | \
  xargs grep -L '^from tests.unit.waiting' | grep -vE 'test_(jobs_kept|commands_driven)')
BUILT := $(VENV)/.stamp-build
FOR_DEMO := $(VENV)/.stamp-demo
FOR_DEV := $(VENV)/.stamp-dev

.PHONY: help demo pipeline test test-changed test-all soak lint types mypy pyright docs bench core-coverage leaves wheels lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(FOR_DEMO) ## real flights through Spark, Kafka and exactly-once handlers, checked to the last flight
	@$(BIN)/python -m examples.flights $(ARGS)

pipeline: $(FOR_DEMO) ## files -> Spark -> event source -> Spark's tables and a report, each stage killed on the way, checked to the last flight
	@$(BIN)/python -m examples.pipeline.main $(ARGS)

test: leaves ## the change gate, by three processes (TESTERS=1: one): every promise has a test in it
	@$(BIN)/python -m pytest -n $(TESTERS) $(BY_FILE) -m "not soak and not nightly" $(ARGS)

test-changed: leaves ## tests of the change gate that a change since BASE (the merge base with main) can reach, by imports
	@chosen=$$($(BIN)/python tests/changed.py $(BASE)); \
	  [ -z "$$chosen" ] || $(BIN)/python -m pytest -n $(TESTERS) $(BY_FILE) -m "not soak and not nightly" $$chosen $(ARGS)

test-all: leaves ## the change gate and everything that is nightly: the whole batteries, the full demo; then the hot path in plain Python
	@$(BIN)/python -m pytest -n $(TESTERS) $(BY_FILE) $(ARGS)
	@KES_PLAIN=1 $(BIN)/python -m pytest -n $(TESTERS) $(BY_FILE) -m "not soak and not nightly" tests/unit tests/property tests/simulation

soak: $(FOR_DEV) ## the nightly run: new examples of all properties; three brokers, four members, everything killed in turn (SOAK_MINUTES=10 SEED= SOAK_REPORT=file.md)
	@$(BIN)/python -m pytest tests/property --hypothesis-profile=search
	@$(BIN)/python -m pytest -m soak -s tests/soak $(ARGS)

lint: $(FOR_DEV) ## style, and who may import whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: mypy pyright ## mypy --strict and pyright

mypy: $(FOR_DEV)
	$(BIN)/mypy $(ARGS)

pyright: $(FOR_DEV)
	$(BIN)/basedpyright --pythonpath $(BIN)/python $(ARGS)

core-coverage: export KES_PLAIN = 1
core-coverage: $(FOR_DEV) ## the deciding code (streams/core): every branch taken by the tests that import it
	$(BIN)/coverage run -m pytest -q -m "not soak and not nightly" $(OF_CORE) $(ARGS)
	$(BIN)/coverage report --fail-under=100

docs: export KES_PLAIN = 1
docs: $(FOR_DEV) ## the documentation as HTML; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html -d $(VENV)/doctrees docs docs/_build/html $(ARGS)
	@echo "docs: docs/_build/html/index.html"

bench: leaves ## speed, beside a hand-written loop and other toolkits: 20 minutes (ARGS=--quick: 2, ARGS=--full: hours)
	@$(BIN)/python -m streams.sak.spark_jar || true # it says what is missing; the figures say which tasks ran
	@$(BIN)/python -m benchmarks $(ARGS)

leaves: $(FOR_DEV) ## compile the hot path, where there is a C compiler (test, test-all and bench do it first)
	@$(BIN)/python -m streams.sak.compiling

wheels: $(FOR_DEV) ## dist/: the wheel of plain Python, and the one for this platform and Python with the hot path compiled
	@KES_COMPILED_WHEEL=0 $(WHEEL) .
	@KES_COMPILED_WHEEL=1 $(WHEEL) .

lock: $(FOR_DEV) ## write requirements/*.txt: exact versions, hashed (ARGS=--upgrade: the newest allowed)
	@for set in build dev demo faust; do \
	  case $$set in \
	    build|faust) source="requirements/$$set.in" ;; \
	    dev)   source="pyproject.toml --all-extras" ;; \
	    demo)  source="pyproject.toml --extra demo --constraint requirements/dev.txt" ;; \
	  esac; \
	  echo "locking requirements/$$set.txt"; \
	  $(BIN)/uv pip compile $$source --output-file requirements/$$set.txt --universal --python-version 3.11 \
	    --generate-hashes --no-annotate --no-header --no-emit-index-url --quiet $(ARGS); \
	done

clean: ## forget what was built (not the caches of downloaded jars)
	find streams -name '*.so' -delete
	rm -rf $(VENV) docs/_build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

# ------------------------------------------------------------------------------------------ environment

$(BUILT): requirements/build.txt
	@if ! $(BIN)/python -c pass 2>/dev/null; then \
	  for python in $(PYTHON) python3.13 python3.12 python3.11 none; do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	  done; \
	  if [ "$$python" = none ]; then \
	    echo "setup: Python 3.11 or newer is needed, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	    echo "setup: install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; \
	  fi; \
	  if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "setup: $$python cannot make virtual environments (module venv or ensurepip is missing)." >&2; \
	    echo "setup: on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	  fi; \
	  echo "setup: making $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv "$(VENV)"; \
	fi
	@$(PIP) --quiet --require-hashes -r requirements/build.txt
	@touch $@

$(FOR_DEMO): $(BUILT) requirements/demo.txt pyproject.toml
	@echo "setup: installing what the demo needs (once; PySpark is large, a few minutes on a slow line)"
	@$(PIP) $(QUIET) --require-hashes -r requirements/demo.txt
	@$(PIP) --quiet --no-deps -e .
	@touch $@

$(FOR_DEV): $(BUILT) requirements/dev.txt pyproject.toml
	@echo "setup: installing what tests, checks and docs need (once; PySpark is large, a few minutes on a slow line)"
	@$(PIP) $(QUIET) --require-hashes -r requirements/dev.txt
	@$(PIP) --quiet --no-deps -e .
	@touch $@ $(FOR_DEMO)

# On a terminal pip shows its progress bars; in a log one line per package is noise.
QUIET = $(if $(MAKE_TERMOUT),,--quiet)
