#!/usr/bin/env bash
# The whole test command: the checks of scripts/lint.sh, then the tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

bash scripts/lint.sh

tests() {
    python -m pytest --durations=12 "$@" || [ $? -eq 5 ]  # 5: none was selected
}

case "$*" in
*tests/*) tests "$@" ;;
*)
    tests tests/unit tests/property tests/golden -n 2 --dist loadfile --no-loadscope-reorder "$@"
    tests tests/e2e tests/chaos tests/gpu "$@" # whole jobs: each has the machine to itself
    ;;
esac
