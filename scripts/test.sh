#!/usr/bin/env bash
# The whole test command: style, direction of imports, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

ruff check .
lint-imports
python -m pytest "$@"
