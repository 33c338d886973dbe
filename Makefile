# `make run` serves, `make test` tests, `make check` keeps the house. All of them bring .venv up to date first,
# and skip pip when nothing changed. What may be set: `make help`.
VENV ?= .venv
PORT ?= 8000
TORCH ?= torch==2.13.0
MODEL ?=
ARGS ?=
KVSTORE_ARGS ?=
PYTEST_ARGS ?=
SOAK_ARGS ?=
COMPOSE_ARGS ?=
export VENV PORT TORCH MODEL ARGS KVSTORE_ARGS

BIN := $(VENV)/bin
# What kernels are compiled and launched with, where there is a card to run them.
GPU := $(if $(shell command -v nvidia-smi 2>/dev/null),gpu)
SUPPORTED := import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# The interpreter that starts deploy/install.py: yours, else that of $(VENV), else the first that fits.
FIND_PYTHON = for python in $(or $(PYTHON),$(BIN)/python python3 python3.13 python3.12 python3.11); do \
  "$$python" -c '$(SUPPORTED)' >/dev/null 2>&1 && break; python=; done; \
  test -n "$$python" || { echo "error: $(if $(PYTHON),$(PYTHON) is not,found no) Python 3.11, 3.12 or 3.13; \
  install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
INSTALL = @$(FIND_PYTHON); "$$python" -m deploy.install $(if $(PYTHON),--remake)

.PHONY: run test test-slow test-routers test-clients soak test-gpu test-browser compose-cpu compose-gpu compose-test lock check stubs dashboards docs clean help

run: ## serve on http://127.0.0.1:$(PORT), kvstore and decoder, until Ctrl-C
	$(INSTALL) decoder $(GPU) && exec $(BIN)/hotset serve --port "$$PORT" $${MODEL:+--model "$$MODEL"} \
	  $(ARGS) --store-args="$$KVSTORE_ARGS"

test: ## everything the fast tests need, then the tests
	$(INSTALL) decoder gpu ucx nixl events test && exec $(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: ## the tests that take minutes
	$(INSTALL) decoder gpu ucx nixl events test dev && exec $(BIN)/python -m pytest -m 'slow and not gpu' $(PYTEST_ARGS)

test-routers: ## two nodes behind vllm-router and behind sglang-router
	$(INSTALL) decoder gpu ucx events test routers && exec $(BIN)/python -m pytest -m slow tests/routers $(PYTEST_ARGS)

test-clients: ## clients and load generators that others wrote, from their registries, against a live server
	$(INSTALL) decoder gpu ucx events test && exec $(BIN)/python -m pytest -m slow tests/clients $(PYTEST_ARGS)

soak: ## ten minutes of random requests and aborts on tiny pools
	$(INSTALL) decoder gpu test && exec $(BIN)/python -m tests.soak $(SOAK_ARGS)

test-gpu: ## the tests that need an NVIDIA GPU
	$(INSTALL) decoder gpu test && exec $(BIN)/python -m pytest -m gpu -p tests.gpu.results $(PYTEST_ARGS)

compose-cpu: ## build the images and run everything in containers, on the CPU
	exec docker compose up --build

compose-gpu: ## the same on a machine with an NVIDIA GPU and its container toolkit
	exec docker compose -f docker-compose.yml -f docker-compose.gpu.yml up --build

compose-test: ## the images and docker-compose.yml on a Docker engine of its own; needs root and Debian
	$(INSTALL) decoder test && exec $(BIN)/python -m tests.compose $(COMPOSE_ARGS)

lock: ## resolve anew what the images install
	$(INSTALL) dev && exec $(BIN)/python -m deploy.lock

test-browser: ## the status page in headless Chromium, which Debian's apt installs if it is missing
	$(INSTALL) decoder test browser && $(BIN)/python -m tests.browser.debian && \
	  exec $(BIN)/python -m pytest -m slow tests/browser $(PYTEST_ARGS)

check: ## ruff, mypy --strict, floors
	$(INSTALL) decoder gpu ucx nixl events test browser dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_floors.py

stubs: ## generate the gRPC stubs beside their sources
	$(INSTALL) dev && PATH="$(abspath $(BIN)):$$PATH" exec $(BIN)/python proto/build_stubs.py

dashboards: ## write Grafana's dashboards from deploy/grafana/*.py
	$(INSTALL) decoder test && exec $(BIN)/python -m deploy.grafana

docs: ## write the file tree into README.md
	$(INSTALL) decoder test && exec $(BIN)/python -m tests.house.file_tree

clean: ## remove the environment, stubs and caches; the model cache stays
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f proto/hotset/v1/*_pb2*.py proto/hotset/v1/*_pb2*.pyi
	find services tests deploy benchmarks proto -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo 'May be set:'
	@echo '  PORT=8000           port of the HTTP server'
	@echo '  MODEL=/path         a Hugging Face checkpoint directory; default: a bundled SmolLM2-135M-Instruct'
	@echo '  ARGS="--max-rows 4" flags of the decoder; its list: $(BIN)/python -m services.decoder --help'
	@echo '  KVSTORE_ARGS="..."  flags of kvstore'
	@echo '  TORCH=torch==2.13.0 what pip is given for torch: a version, or options that choose a build'
	@echo '  PYTHON=python3.12   interpreter of the environment; VENV=.venv where it lies'
	@echo '  COMPOSE_ARGS=--require  compose-test fails where the machine cannot run it'
	@echo '  PYTEST_ARGS="-k x"  passed to pytest'
