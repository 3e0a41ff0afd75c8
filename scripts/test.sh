#!/usr/bin/env bash
# Run the checks of scripts/lint.sh and the tests. Arguments go to pytest.
# A path below tests/ among them: only these tests, in one process.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYRIGHT_PYTHON_IGNORE_WARNINGS=1

tests() {
    python -m pytest --durations=12 "$@" || [ $? -eq 5 ]  # 5: none was selected
}

two_processes=(-n 2 --dist loadfile --no-loadscope-reorder)

bash scripts/lint.sh quick
case "$*" in
*tests/*)
    pyright
    tests "$@"
    ;;
*)
    tests tests/unit tests/property tests/golden "${two_processes[@]}" "$@"
    # Types take two minutes of one core: they are checked while jobs wait for their processes.
    types_log=$(mktemp)
    pyright >"$types_log" 2>&1 &
    types=$!
    trap 'kill "$types" 2>/dev/null || true; rm -f "$types_log"' EXIT
    # Two whole jobs at once, but two would share the memory of one GPU.
    [ -e /dev/nvidia0 ] && two_processes=()
    tests tests/e2e tests/chaos tests/gpu "${two_processes[@]}" "$@"
    wait "$types" || { cat "$types_log"; exit 1; }
    tail -n 1 "$types_log"
    ;;
esac
