# The whole vocabulary of the project. `make` alone lists it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
export VENV ?= .venv
PY := $(VENV)/bin/python
TESTS ?= libs services tests tools
JOBS ?= 2
PYTEST := $(PY) -m pytest
# Status 5 says that a folder has no tests of the kind: no failure when one folder is asked for.
OR_NONE := || [ $$? -eq 5 ]

.PHONY: help demo up test check format docs bench-cold-start lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

demo:  ## the whole system on this machine, one cold and one warm chat, the cold start as a waterfall
	@tools/bootstrap.sh runtime
	@$(VENV)/bin/pilotlight demo

up:  ## start the system with the demo model and keep it running until Ctrl-C
	@tools/bootstrap.sh runtime
	@$(VENV)/bin/pilotlight up --with-demo-model

test:  ## unit, contract and end-to-end tests
	@tools/bootstrap.sh dev
	@$(PYTEST) $(TESTS) -m "not e2e" --numprocesses $(JOBS) --dist loadfile $(OR_NONE)
	@$(PYTEST) $(TESTS) -m e2e $(OR_NONE)

check:  ## lint, format, types, layers, generated pages
	@tools/bootstrap.sh dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports
	$(PY) tools/generate_docs.py --check

format:  ## format and fix what can be fixed
	@tools/bootstrap.sh dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs:  ## render the generated pages: settings, states
	@tools/bootstrap.sh dev
	$(PY) tools/generate_docs.py

bench-cold-start:  ## cold and warm first tokens of the demo model on this machine, as JSON
	@tools/bootstrap.sh runtime
	@$(PY) bench/cold_start.py

lock:  ## compile constraints.txt anew from the members' requirements
	@tools/bootstrap.sh dev
	tools/lock.sh

clean:  ## remove the environment, caches and the demo's state; your own state in .pilotlight stays
	rm -rf $(VENV) .pilotlight/demo .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
