#!/usr/bin/env bash
# What is checked without running anything: layout, style, direction of imports, types.
set -euo pipefail
cd "$(dirname "$0")/.."
# pyright and its node come from the installed wheels; this keeps it from asking for a newer release.
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1

ruff format --check .
ruff check .
lint-imports
pyright
