# The two commands a newcomer needs: `make serve` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help serve test check format models bench bench-models bench-workers clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  \1\t/' | expand -t 18

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip

$(VENV)/.serve: pyproject.toml | $(VENV)/bin/pip
	@echo "installing into $(VENV) ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[cpu]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/pip
	@echo "installing into $(VENV), with what the tests need ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[cpu,test]'
	@touch $@ $(VENV)/.serve

models: $(VENV)/.serve ## Fetch and build the embedded models, once
	@$(BIN)/gateway models build >/dev/null

serve: models ## Run the gateway on :8080 with a stand-in heavy backend on :9100
	@GATEWAY_HINTS=1 exec $(BIN)/gateway serve --with-stand-in

test: $(VENV)/.test models ## Run all tests
	$(BIN)/python -m pytest

check: $(VENV)/.test ## Format, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

format: $(VENV)/.test ## Rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.test models ## Gateway beside bare servers, one core each (QUICK=1 is shorter)
	$(BIN)/gateway bench front

bench-models: $(VENV)/.test models ## First tokens, tokens a second, event-loop lag on the real models
	$(BIN)/gateway bench models

bench-workers: $(VENV)/.test models ## Two workers beside one, hub, restarts under load, model host (QUICK=1 is shorter)
	$(BIN)/gateway bench workers

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
