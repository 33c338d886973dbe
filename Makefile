# `make run` serves, `make test` tests, `make check` keeps the house. PYTHON, PORT and MODEL may be set.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: stubs check

stubs: ## generate the gRPC stubs beside their sources
	$(BIN)/python proto/build_stubs.py

check: ## ruff, mypy --strict, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_floors.py
