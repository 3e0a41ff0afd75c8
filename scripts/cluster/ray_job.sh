#!/usr/bin/env bash
# Submit a run to a Ray cluster that is already up, follow its log, and stop it when this script is stopped.
#
#   RAY_ADDRESS=http://head:8265 scripts/cluster/ray_job.sh CONFIG trainer.default_local_dir=/shared/run [key=value ...]
#
# CONFIG is a name that --config-name takes; the run directory is an absolute path on storage that all nodes share. A
# run that fails is submitted again, three times, and goes on from its newest checkpoint (trainer.resume_mode=auto).
# The cluster's token is read from RAY_AUTH_TOKEN or ~/.ray/auth_token; RAY_AUTH_MODE=disabled for one without.
set -euo pipefail

if [ "$#" -lt 1 ]; then
    echo "usage: RAY_ADDRESS=http://head:8265 $0 CONFIG [key=value ...]" >&2
    exit 2
fi
: "${RAY_ADDRESS:?the address of the cluster, for example http://head:8265}"
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
config=$1
shift

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${RLVCR_PYTHON:-$root/.venv/bin/python}
ray="$(dirname "$python")/ray"
remote_python=${RLVCR_REMOTE_PYTHON:-python}
attempts=${RLVCR_ATTEMPTS:-3}
name="${config//[^A-Za-z0-9_]/_}-$(date +%Y%m%d-%H%M%S)-$$"
job=""

stop_job() {
    trap - INT TERM
    if [ -n "$job" ]; then
        "$ray" job stop --address "$RAY_ADDRESS" "$job" || true
    fi
    exit 143
}
trap stop_job INT TERM

# Submit, follow the log to its end, and leave the last answer of the cluster in `status`.
play() { # number of the attempt, then words of the run
    job="$name-$1"
    shift
    "$ray" job submit --address "$RAY_ADDRESS" --submission-id "$job" --working-dir "$root" --no-wait \
        --runtime-env-json '{"excludes": [".venv", ".git", "runs", "data"]}' -- \
        "$remote_python" -m verl.trainer.main_ppo --config-name "$config" trainer.resume_mode=auto "$@"
    # In the background, so that signals are heard at once.
    "$ray" job logs --address "$RAY_ADDRESS" --follow "$job" &
    wait "$!" || true
    status=$("$ray" job status --address "$RAY_ADDRESS" "$job")
    echo "$status"
}

for attempt in $(seq 0 "$attempts"); do
    play "$attempt" "$@"
    if grep -qi succeeded <<< "$status"; then
        exit 0
    fi
    if grep -qi "stopped\|exit code 2\b" <<< "$status"; then
        break # by somebody, or for settings that no other attempt mends
    fi
    echo "attempt $attempt failed; $((attempts - attempt)) more" >&2
done
exit 1
