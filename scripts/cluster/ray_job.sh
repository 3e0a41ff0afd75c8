#!/usr/bin/env bash
# Submit a run to a Ray cluster that is already up, follow its log, and stop it when this script is stopped.
#
#   RAY_ADDRESS=http://head:8265 scripts/cluster/ray_job.sh CONFIG trainer.default_local_dir=/shared/run [key=value ...]
#
# CONFIG is a name that --config-name takes; the run directory is an absolute path on storage that all nodes share. A
# run that was cut off goes on from its newest checkpoint when it is submitted again (trainer.resume_mode=auto).
set -euo pipefail

if [ "$#" -lt 1 ]; then
    echo "usage: RAY_ADDRESS=http://head:8265 $0 CONFIG [key=value ...]" >&2
    exit 2
fi
: "${RAY_ADDRESS:?the address of the cluster, for example http://head:8265}"
config=$1
shift

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${RLVCR_PYTHON:-$root/.venv/bin/python}
ray="$(dirname "$python")/ray"
remote_python=${RLVCR_REMOTE_PYTHON:-python}
job="${config//[^A-Za-z0-9_]/_}-$(date +%Y%m%d-%H%M%S)-$$"

stop_job() {
    trap - INT TERM
    "$ray" job stop --address "$RAY_ADDRESS" "$job" || true
    exit 143
}
trap stop_job INT TERM

"$ray" job submit --address "$RAY_ADDRESS" --submission-id "$job" --working-dir "$root" --no-wait \
    --runtime-env-json '{"excludes": [".venv", ".git", "runs", "data"]}' -- \
    "$remote_python" -m verl.trainer.main_ppo --config-name "$config" trainer.resume_mode=auto "$@"

# In the background, so that signals are heard at once.
"$ray" job logs --address "$RAY_ADDRESS" --follow "$job" &
wait "$!" || true
status=$("$ray" job status --address "$RAY_ADDRESS" "$job")
echo "$status"
grep -qi succeeded <<< "$status"
