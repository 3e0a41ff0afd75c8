#!/usr/bin/env bash
# Run the checks of scripts/lint.sh and the tests. Arguments go to pytest.
# A path below tests/ among them: only these tests, in one process.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYRIGHT_PYTHON_IGNORE_WARNINGS=1

# Each part has a time limit in seconds. At its end SIGABRT makes pytest print the stacks of its
# threads.
limit() {
    timeout --foreground --signal=ABRT --kill-after=30 "$@"
}
tests() {
    limit 2400 python -m pytest --durations=12 "$@" || [ $? -eq 5 ]  # 5: none was selected
}

bash scripts/lint.sh quick
case "$*" in
*tests/*)
    limit 900 pyright
    tests "$@"
    ;;
*)
    # Both groups wait more than they compute, so they run at the same time. The jobs run one after
    # the other. The output of the unit tests and of pyright follows at the end. A crashed worker is
    # not restarted, because pytest-xdist would then wait forever after the last test.
    unit_log=$(mktemp)
    {
        tests tests/unit tests/property tests/golden \
            -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --maxfail 10 "$@"
        tests tests/fake_gpu "$@"  # in a separate process, because it adds a device to torch
        limit 900 pyright
    } >"$unit_log" 2>&1 &
    unit=$!
    trap 'kill "$unit" 2>/dev/null || true; cat "$unit_log"; rm -f "$unit_log"' EXIT
    trap 'exit 143' TERM
    status=0
    tests tests/e2e tests/chaos tests/gpu "$@" || status=$?
    wait "$unit" || status=$?
    exit "$status"
    ;;
esac
