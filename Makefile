# Needs Python 3.11, 3.12 or 3.13 (PYTHON=python3.12) and make. `make train` trains the quickstart, `make test` runs everything that must hold.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS ?= requirements/cpu.txt
STAMP := $(VENV)/.requirements
ARGS ?=

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
unexport PYTHONDONTWRITEBYTECODE  # dozens of processes would compile the same libraries again, each for itself

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

# The first half of `make test`: layout, style, direction of imports, types.
lint: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/lint.sh

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Do the tests notice a wrong line? Continues where it was stopped; ARGS="rlvcr/thinking.py" does one module.
mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.dev.mutants $(ARGS)
