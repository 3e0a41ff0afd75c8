#!/usr/bin/env bash
# Run the checks of scripts/lint.sh and the tests. Arguments go to pytest.
# A path below tests/ among them: only these tests, in one process.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYRIGHT_PYTHON_IGNORE_WARNINGS=1

tests() {
    python -m pytest --durations=12 "$@" || [ $? -eq 5 ]  # 5: none was selected
}

bash scripts/lint.sh quick
case "$*" in
*tests/*)
    pyright
    tests "$@"
    ;;
*)
    tests tests/unit tests/property tests/golden -n 2 --dist loadfile --no-loadscope-reorder "$@"
    # Types take two minutes of one core: they are checked while the first jobs run.
    types_log=$(mktemp)
    pyright >"$types_log" 2>&1 &
    types=$!
    trap 'kill "$types" 2>/dev/null || true; rm -f "$types_log"' EXIT
    tests tests/e2e tests/chaos tests/gpu "$@" # whole jobs: each has the machine to itself
    wait "$types" || { cat "$types_log"; exit 1; }
    tail -n 1 "$types_log"
    ;;
esac
