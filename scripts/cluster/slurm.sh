#!/usr/bin/env bash
# Train on a Slurm cluster: one Ray head, one Ray worker per further node, the driver on the head.
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/cluster/slurm.sh CONFIG [key=value ...]
#
# CONFIG is a name that --config-name takes. Nodes and devices of the allocation and the run directory, below this one
# (which all nodes have to share), are filled in; every override wins over them. Ten minutes before the time limit the job asks to be queued again and goes on from its newest checkpoint
# (trainer.resume_mode=auto), so keep trainer.save_freq above zero.
#SBATCH --job-name=rlvcr
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if [ "$#" -lt 1 ]; then
    echo "usage: sbatch [options] $0 CONFIG [key=value ...]" >&2
    exit 2
fi
config=$1
shift

root=${RLVCR_ROOT:-${SLURM_SUBMIT_DIR:-$(pwd)}}
python=${RLVCR_PYTHON:-$root/.venv/bin/python}
ray="$(dirname "$python")/ray"
port=${RLVCR_RAY_PORT:-6379}
cd "$root"

# One token for this job: only its own processes may talk to its Ray cluster.
state=$(mktemp -d "${TMPDIR:-$root}/rlvcr-$SLURM_JOB_ID-XXXXXX")
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$state/token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(cat "$state/token")

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes[0]}
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head_node" hostname --ip-address | awk '{print $1}')
gpus=${SLURM_GPUS_ON_NODE:-0}
pids=()
driver=""

# Ends what this job started and nothing else: by process id, driver first.
cleanup() {
    trap - EXIT INT TERM USR1
    for pid in $driver "${pids[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    for pid in $driver "${pids[@]}"; do
        wait "$pid" 2>/dev/null || true
    done
    rm -rf "$state"
}

requeue() {
    echo "time limit ahead: queueing job $SLURM_JOB_ID again" >&2
    cleanup
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap cleanup EXIT
trap 'cleanup; exit 143' INT TERM
trap requeue USR1

start_ray() { # node, then arguments of `ray start`
    local node=$1
    shift
    srun --nodes=1 --ntasks=1 --nodelist="$node" --export=ALL \
        "$ray" start --block --disable-usage-stats --num-gpus="$gpus" "$@" &
    pids+=("$!")
}

start_ray "$head_node" --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false
for node in "${nodes[@]:1}"; do
    start_ray "$node" --address="$head_ip:$port"
done

# All nodes within five minutes, or the job fails and says how many came.
export RAY_ADDRESS="$head_ip:$port"
"$python" - "${#nodes[@]}" <<'PYTHON'
import sys
import time

import ray

wanted, deadline, found = int(sys.argv[1]), time.monotonic() + 300, 0
while time.monotonic() < deadline:
    try:
        ray.init(address="auto", log_to_driver=False)
        found = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except (ConnectionError, RuntimeError):
        found = 0
    if found >= wanted:
        sys.exit(0)
    time.sleep(5)
sys.exit(f"{found} of {wanted} nodes joined the Ray cluster within five minutes")
PYTHON

# With `wait` the shell hears its signals while the driver runs.
"$python" -m verl.trainer.main_ppo --config-name "$config" \
    trainer.nnodes="${#nodes[@]}" trainer.n_gpus_per_node="$((gpus > 0 ? gpus : 1))" trainer.resume_mode=auto \
    trainer.default_local_dir="$root/runs/\${trainer.project_name}/\${trainer.experiment_name}" "$@" &
driver=$!
wait "$driver"
