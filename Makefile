# The verbs of this repository. `make` alone lists them; CI runs the same ones.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# The first python of 3.11 or later; PYTHON=... takes another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# More arguments for pip, for example an index with CPU builds of torch.
PIP_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
CONFIG ?= configs/local.yaml
ARGS ?=
# A folder with traces/ and perf/, for bench-planner.
DATA ?=

.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## Make .venv and install pdserve with its workers
	@echo "pdserve is installed: $(BIN)/pdserve --help"

serve: $(VENV)/.installed ## Get the model and serve configs/local.yaml until Ctrl-C (CONFIG=, ARGS=)
	@exec $(BIN)/pdserve up $(CONFIG) $(ARGS)

test: $(VENV)/.installed-dev ## Run the test suite in two processes (ARGS= goes to pytest)
	$(BIN)/python -m pytest -m "not slow" -n 2 --no-loadscope-reorder \
		-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true $(ARGS)

pictures: $(VENV)/.installed-dev ## Make the dashboard's pictures in docs/images again; chromium
	PDSERVE_PICTURES=docs/images $(BIN)/python -m pytest tests/router/test_dashboard_browser.py $(ARGS)

test-bench-peer: $(VENV)/.installed-dev ## Hold pdserve bench against guidellm; installs it apart
	test -x $(VENV)-guidellm/bin/guidellm || { $(PYTHON) -m venv $(VENV)-guidellm && \
		$(VENV)-guidellm/bin/python -m pip install -q $(PIP_ARGS) guidellm; }
	GUIDELLM=$(abspath $(VENV)-guidellm/bin/guidellm) $(BIN)/python -m pytest -m slow -s \
		tests/loadgen/test_guidellm.py $(ARGS)

test-clients: $(VENV)/.installed-dev ## Test LangChain and lm-eval against a live deployment
	$(PIP) install $(PIP_ARGS) -e ".[clients]" | { grep -v "already satisfied" || true; }
	$(BIN)/python -m pytest -m slow tests/clients -W default $(ARGS)

test-gpu: $(VENV)/.installed-dev ## Run what needs a GPU: device paths against the CPU's answers
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

test-memory: $(VENV)/.installed-dev ## Measure what loading every kind of checkpoint takes
	$(BIN)/python -m pytest -m slow tests/engine/test_load_memory.py $(ARGS)

test-hosts: $(VENV)/.installed-dev ## Test a hand-over between network namespaces; root and iproute2
	$(BIN)/python -m pytest -m slow tests/hosts $(ARGS)

test-nodes: $(VENV)/.installed-dev ## Test several Ray nodes: killed, drained, added; the head lost
	$(BIN)/python -m pytest -m slow tests/nodes $(ARGS)

test-k8s: $(VENV)/.installed-dev ## Run the containers' commands of k8s/ here, as processes
	$(BIN)/python -m pytest -m slow tests/k8s $(ARGS)

test-tls: $(VENV)/.installed-dev ## Run a deployment with mutual TLS inside and two routers
	$(BIN)/python -m pytest -m slow tests/e2e/test_tls_live.py $(ARGS)

test-autoscaling: $(VENV)/.installed-dev ## Simulate the autoscaler over hours of virtual time
	$(BIN)/python -m pytest -m slow tests/planner/test_autoscaled.py $(ARGS)

fuzz: $(VENV)/.installed-dev ## Send 5000 and more requests that the OpenAPI document allows, and does not
	$(BIN)/python -m pytest -m slow tests/e2e/test_fuzz.py -s $(ARGS)

lint: $(VENV)/.installed-dev ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: $(VENV)/.installed-dev ## Make the gRPC stubs in rpc/ from proto/ again
	$(BIN)/python -m grpc_tools.protoc -I rpc=proto --python_out=. --pyi_out=. --grpc_python_out=. \
		proto/*.proto

models-check: $(VENV)/.installed-dev ## Print every model family's errors against transformers (ARGS=families)
	PYTHONPATH=.:tests $(BIN)/python -m support.models_check $(ARGS)

bench-compare: $(VENV)/.installed ## Is P/D worth it here? One load: colocated, disaggregated, conditional
	$(BIN)/pdserve compare $(CONFIG) $(ARGS)

bench-engine: $(VENV)/.installed ## Measure an engine step: decode by batch size, a long prefill
	$(BIN)/python benchmarks/engine.py $(ARGS)

bench-peers: $(VENV)/.installed ## Measure vLLM, llama.cpp and this engine in turn (CLIENT=load.py)
	$(BIN)/python benchmarks/peers.py $(if $(CLIENT),--client $(CLIENT)) $(ARGS)

bench-perplexity: $(VENV)/.installed ## Measure what quantised weights and KV cost in quality
	$(BIN)/python benchmarks/perplexity.py $(ARGS)

bench-gpu: $(VENV)/.installed ## Measure steps on a GPU against its own limits; random weights
	$(BIN)/python benchmarks/gpu.py $(ARGS)

bench-handover: $(VENV)/.installed ## Measure what a hand-over adds to a request
	$(BIN)/python benchmarks/hand_over.py $(ARGS)

bench-interference: $(VENV)/.installed ## Measure what long prompts do to streams, split and colocated
	$(BIN)/python benchmarks/interference.py $(ARGS)

bench-kv: $(VENV)/.installed ## Measure the bandwidth of the KV transports
	$(BIN)/python benchmarks/kv_bandwidth.py $(ARGS)

bench-overhead: $(VENV)/.installed ## Measure what router, gRPC and Python add to a step of 16 streams
	$(BIN)/python -m benchmarks.overhead $(ARGS)

bench-router: $(VENV)/.installed ## Measure what the router adds, and how many streams a core carries
	$(BIN)/python benchmarks/router.py $(ARGS)

bench-planner: $(VENV)/.installed ## Hold pdserve plan against published results (DATA=folder)
	@test -n "$(DATA)" || { echo "pdserve: error: say where the traces are: make bench-planner" \
		"DATA=folder; docs/planning.md names the files" >&2; exit 1; }
	$(BIN)/python -m benchmarks.planner_published $(DATA)

bench-planner-live: $(VENV)/.installed ## Hold pdserve plan against a live deployment; minutes
	$(BIN)/python -m benchmarks.planner_live $(ARGS)

bench-planner-scale: $(VENV)/.installed ## Simulate a million requests on a thousand workers
	$(BIN)/python -m benchmarks.planner_scale $(ARGS)

clean: ## Remove .venv and what tools have cached
	rm -rf $(VENV) $(VENV)-guidellm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- environments

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "pdserve: error: Python 3.11 or later is needed and was not found; install it," \
			"or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "pdserve: error: cannot make $(VENV); on Debian or Ubuntu: apt install python3-venv" >&2; \
		exit 1; }

# The stamps: nothing is installed again before pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing pdserve and what its workers need (torch, ray, nixl: some minutes)"
	$(PIP) install $(PIP_ARGS) -e ".[worker]" | { grep -v "already satisfied" || true; }
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing pdserve with what tests and checks need (some minutes)"
	$(PIP) install $(PIP_ARGS) -e ".[worker,test,dev]" | { grep -v "already satisfied" || true; }
	@touch $(VENV)/.installed $@
