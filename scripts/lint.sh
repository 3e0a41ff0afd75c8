#!/usr/bin/env bash
# Check layout, style, direction of imports, types and language. `quick` skips the types.
set -euo pipefail
cd "$(dirname "$0")/.."
# pyright and its node come from the installed wheels; this keeps it from asking for a newer release.
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1

ruff format --check .
ruff check .
lint-imports
[ "${1:-}" = quick ] || pyright
# Words, docstrings, names and sizes against the limits of scripts/dev/check_language.py.
python scripts/dev/check_language.py
