# Needs Python 3.11, 3.12 or 3.13 (PYTHON=python3.12) and make. `make train` trains the quickstart, `make test` runs everything that must hold.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS ?= requirements/cpu.txt
STAMP := $(VENV)/.requirements
ARGS ?=

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
unexport PYTHONDONTWRITEBYTECODE  # without bytecode files, each process would compile the same libraries again

.PHONY: setup train test lint format mutants

# Installed once: the stamp holds the hash of what was installed, so a second call does nothing.
setup:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@want="$$(cat $(REQUIREMENTS) setup.py verl/__init__.py | sha256sum | cut -d' ' -f1) $$(pwd)"; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" != "$$want" ]; then \
		$(BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps -r $(REQUIREMENTS) && \
		$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e . && \
		printf '%s' "$$want" > $(STAMP); \
	fi

train: setup
	$(BIN)/python -m verl.trainer.main_ppo $(ARGS)

test: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/test.sh $(ARGS)

# The checks of `make test` without tests: layout, style, direction of imports, types.
lint: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/lint.sh

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Mutation tests. They continue after an interruption; ARGS="rlvcr/thinking.py" tests one module.
mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.dev.mutants $(ARGS)
