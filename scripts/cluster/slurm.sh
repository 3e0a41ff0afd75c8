#!/usr/bin/env bash
# Train on a Slurm cluster: one Ray head, one Ray worker per further node, the driver on the head.
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/cluster/slurm.sh CONFIG [key=value ...]
#
# CONFIG is a name that --config-name takes. Nodes and devices of the allocation and the run directory, below this one
# (which all nodes have to share), are filled in; every override replaces them. The job continues from its newest
# checkpoint (trainer.resume_mode=auto, so keep trainer.save_freq above zero) when it is queued again: by itself ten
# minutes before its time limit and, three times, where a node or the run fails; by Slurm where it loses a node.
# RLVCR_HEAD_IP is the address under which the other nodes reach the first one, where its name does not say it.
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

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes[0]}
gpus=${SLURM_GPUS_ON_NODE:-0}
attempts=${RLVCR_ATTEMPTS:-3}
failures="$root/runs/.slurm-$SLURM_JOB_ID.failures" # outlives this attempt
pids=()
driver=""

# As another node sees it: many systems give a machine's own name an address of the loopback device.
address_of() { # node, the node that asks
    srun --nodes=1 --ntasks=1 --nodelist="$2" getent ahostsv4 "$1" | awk 'NR == 1 {print $1}'
}
head_ip=${RLVCR_HEAD_IP:-127.0.0.1}
if [ "${#nodes[@]}" -gt 1 ] && [ -z "${RLVCR_HEAD_IP:-}" ]; then
    head_ip=$(address_of "$head_node" "${nodes[1]}") || head_ip=""
    case "$head_ip" in
        "" | 127.*)
            echo "${nodes[1]} knows $head_node as '$head_ip', which is no address to reach it by; set RLVCR_HEAD_IP" >&2
            exit 2
            ;;
    esac
fi

# Some may be for engines alone (actor_rollout_ref.rollout.nnodes). Before Ray starts: it refuses a configuration that
# needs GPUs in an allocation without any.
training=$("$python" scripts/cluster/count_training_nodes.py "${#nodes[@]}" "$gpus" "$config" "$@")
devices=() # the config's own number where the allocation has no GPUs
if [ "$gpus" -gt 0 ]; then
    devices=(trainer.n_gpus_per_node="$gpus")
fi

# One token for this job: only its own processes may talk to its Ray cluster.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')

# End only the processes of this job, by process id, driver first.
cleanup() {
    trap - EXIT INT TERM USR1
    for pid in $driver "${pids[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    for pid in $driver "${pids[@]}"; do
        wait "$pid" 2>/dev/null || true
    done
}

requeue() { # why
    echo "$1: queueing job $SLURM_JOB_ID again" >&2
    cleanup
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}

# Start another attempt on newly allocated nodes, up to the limit of attempts.
retry() { # exit status of what failed
    local failed=0
    if [ -f "$failures" ]; then
        failed=$(cat "$failures")
    fi
    if [ "$failed" -ge "$attempts" ]; then
        echo "failed with status $1 after $attempts further attempts" >&2
        exit "$1"
    fi
    mkdir -p "$(dirname "$failures")"
    echo $((failed + 1)) > "$failures"
    requeue "failed with status $1, attempt $((failed + 1)) of $attempts"
}
trap cleanup EXIT
trap 'cleanup; exit 143' INT TERM
trap 'requeue "time limit ahead"' USR1

start_ray() { # node, then arguments of `ray start`
    local node=$1
    shift
    # Without --cpu-bind=none, Slurm may bind Ray and all its workers to the single CPU of one task.
    srun --nodes=1 --ntasks=1 --cpu-bind=none --nodelist="$node" --export=ALL \
        "$ray" start --block --disable-usage-stats --num-gpus="$gpus" "$@" &
    pids+=("$!")
}

start_ray "$head_node" --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false
for node in "${nodes[@]:1}"; do
    start_ray "$node" --address="$head_ip:$port"
done

# All nodes within five minutes, or the job fails and says how many came.
export RAY_ADDRESS="$head_ip:$port"
"$python" scripts/cluster/wait_for_nodes.py "${#nodes[@]}" || retry "$?"

# With `wait` the shell hears its signals while the driver runs.
"$python" -m verl.trainer.main_ppo --config-name "$config" \
    trainer.nnodes="$training" "${devices[@]}" trainer.resume_mode=auto \
    trainer.default_local_dir="$root/runs/\${trainer.project_name}/\${trainer.experiment_name}" "$@" &
driver=$!
status=0
wait "$driver" || status=$?
case "$status" in
    0) rm -f "$failures" ;;
    2) exit 2 ;; # invalid settings: another attempt would fail too
    *) retry "$status" ;;
esac
