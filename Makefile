# flashmod: `make` alone prints the targets below.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
ARGS ?=
PIP_ARGS ?=

# A virtual or conda environment whose python is named on the command line is used as it is, and
# without pins if it has a torch; any other python, and the default, only creates .venv.
ENV := .venv
ifeq ($(origin PYTHON),command line)
OWN := $(shell $(PYTHON) -c 'import os, sys; own = sys.prefix != sys.base_prefix or os.path.isdir(os.path.join(sys.prefix, "conda-meta")); print(sys.prefix if own else "")')
ifneq ($(OWN),)
ENV := $(OWN)
ifneq ($(wildcard $(OWN)/lib/python3*/site-packages/torch),)
CONSTRAINTS ?= /dev/null
endif
endif
endif
CONSTRAINTS ?= constraints.txt
BIN := $(ENV)/bin

# The stamp says which checkout was installed and how: another place, or other arguments where
# some are given, install again; a plain `make` keeps what an earlier PIP_ARGS chose.
STAMP := $(ENV)/.flashmod-installed
HAVE := $(shell cat $(STAMP) 2>/dev/null)
WANTED := $(strip $(CURDIR) $(PYTHON) $(CONSTRAINTS) $(PIP_ARGS))
CHOSEN := $(filter command,$(origin PYTHON))$(filter-out constraints.txt,$(CONSTRAINTS))$(PIP_ARGS)
ifneq ($(findstring $(CURDIR),$(HAVE)),$(CURDIR))
STALE := stale
else ifneq ($(CHOSEN),)
ifneq ($(HAVE),$(WANTED))
STALE := stale
endif
endif

PYTEST = $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadgroup

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  ARGS='...'         more arguments, e.g. make train ARGS='attention=dense trainer.max_steps=50'"
	@echo "  PYTHON=...         another python for .venv, or that of your own environment, which keeps its torch"
	@echo "  PIP_ARGS='...'     more arguments for pip, e.g. an --extra-index-url for another build of torch"
	@echo "  CONSTRAINTS=...    another file of pinned versions; /dev/null pins nothing"

setup: $(STAMP)  ## create .venv and install everything (again only when the pins change)

train: setup  ## set up, train on the default data, print the summary
	$(BIN)/flashmod-train $(ARGS)

sweep: setup  ## sweep sequence lengths; one record and one W&B run each
	$(BIN)/flashmod-train sweep=lengths $(ARGS)

report: setup  ## write one HTML page over all runs in runs/ (ARGS=DIR for another folder)
	$(BIN)/flashmod-report $(or $(ARGS),runs)

verify: setup  ## measure the library against its targets; a table, runs/verify/ (minutes)
	$(BIN)/flashmod-verify $(ARGS)

test: setup  ## run the fast tests
	$(PYTEST) -m "not slow" $(ARGS)

test-all: setup  ## run every test that this machine can run
	$(PYTEST) $(ARGS)

golden: setup  ## record the instructions of the kernels' main loops, which a test compares
	env -u TRITON_INTERPRET $(BIN)/python -m flashmod.kernel_report --golden tests/golden_sm90.json

lint: setup  ## check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy flashmod
	$(BIN)/lint-imports

format: setup  ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache

# pip alone keeps the torch it finds, and a moved .venv does not work: one of ours starts anew.
$(STAMP): pyproject.toml constraints.txt $(STALE)
	@command -v $(PYTHON) > /dev/null || { echo "PYTHON=$(PYTHON): there is no such command"; exit 2; }
	$(if $(and $(STALE),$(HAVE),$(filter .venv,$(ENV))),rm -rf .venv)
	test -x $(BIN)/python || $(PYTHON) -m venv $(ENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]' -c $(CONSTRAINTS) $(PIP_ARGS)
	@echo '$(WANTED)' > $@

.PHONY: help setup train sweep report verify test test-all golden lint format clean stale
