"""Tests of the cluster job scripts, with a fake scheduler and a fake Ray that record their
calls.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.job_submission import JobStatus

from scripts.cluster import count_training_nodes, ray_job, wait_for_nodes
from tests.helpers.jobs import ROOT
from tests.helpers.refusals import has_problem, mentions, missing_parts
from verl.config.load import load_config
from verl.config.schema import PPOConfig
from verl.utils.commands import UsageError

CLUSTER = ROOT / "scripts" / "cluster"
SRUN = r"""#!/bin/sh
echo "srun $*" >> "$LOG"
while [ "${1#--}" != "$1" ]; do
    shift
done
case "$1" in
    getent) [ "$ADDRESS" != none ] && echo "$ADDRESS STREAM $3" ;;
    *) exec sleep 60 ;;
esac
"""
SCONTROL = r"""#!/bin/sh
echo "scontrol $*" >> "$LOG"
[ "$1" != show ] || printf '%s\n' $NODES
"""
PYTHON = r"""#!/bin/sh
echo "python $*" >> "$LOG"
case "$*" in
    *wait_for_nodes*)
        until [ "$(grep -c 'ray start' "$LOG")" = "$(echo $NODES | wc -w)" ]; do sleep 0.05; done
        exit "${JOINED:-0}" ;;
    *training_nodes*) echo "$2"; exit "${NODES_STATUS:-0}" ;;
    *) [ -z "${HANGS:-}" ] || exec sleep 60
       exit "${STATUS:-0}" ;;
esac
"""


class FakeCheckout:
    """Checkout with stubs of the programs that the scripts call. The stubs log their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(CLUSTER, folder / "scripts" / "cluster")
        self.stub("srun", SRUN)
        self.stub("scontrol", SCONTROL)
        self.stub("python", PYTHON)
        self.log = folder / "log"
        self.log.touch()
        self.variables = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "LOG": str(self.log),
            "RLVCR_PYTHON": str(folder / "bin" / "python"),
            "TMPDIR": str(folder),
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_GPUS_ON_NODE": "8",
            "NODES": "n1 n2",
            "ADDRESS": "10.0.0.1",
        }

    def stub(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = ["bash", f"scripts/cluster/{script}", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, *arguments: str, **variables: str) -> tuple[int, str]:
        """Return the exit status and the output."""
        self.log.write_text("")
        process = self.start(script, *arguments, **variables)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def calls(self, beginning: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(beginning)]


@pytest.fixture
def cluster(tmp_path):
    return FakeCheckout(tmp_path)


# ---------------------------------------------------------------- Slurm


def test_slurm_job_starts_ray_on_all_nodes_and_then_the_driver(cluster):
    status, _ = cluster.run("slurm.sh", "quickstart", "trainer.seed=3")
    assert status == 0
    (lookup,) = cluster.calls("srun --nodes=1 --ntasks=1 --nodelist=n2 getent")
    assert lookup.endswith("getent ahostsv4 n1")
    head, worker = sorted(line for line in cluster.calls("srun") if "ray start" in line)
    assert "--nodelist=n1" in head and "--head --node-ip-address=10.0.0.1" in head
    assert "--nodelist=n2" in worker and "--address=10.0.0.1:6379" in worker
    assert "--cpu-bind=none" in head and "--cpu-bind=none" in worker
    (wait_call,) = cluster.calls("python scripts/cluster/wait_for_nodes.py")
    assert wait_call.endswith(" 2")
    (driver,) = cluster.calls("python -m verl.trainer.main_ppo")
    assert "--config-name quickstart trainer.nnodes=2 trainer.n_gpus_per_node=8" in driver
    assert "trainer.resume_mode=auto" in driver and driver.endswith("trainer.seed=3")


@pytest.mark.parametrize("address", ["127.0.1.1", "none"])
def test_loopback_or_missing_head_address_is_refused(cluster, address):
    status, output = cluster.run("slurm.sh", "quickstart", ADDRESS=address)
    assert status == 2 and "RLVCR_HEAD_IP" in output
    assert not cluster.calls("python")


def test_head_address_can_be_set_by_a_variable(cluster):
    status, _ = cluster.run("slurm.sh", "quickstart", ADDRESS="127.0.1.1", RLVCR_HEAD_IP="10.0.0.9")
    assert status == 0 and any("10.0.0.9:6379" in line for line in cluster.calls("srun"))


def test_single_node_needs_no_address(cluster):
    assert cluster.run("slurm.sh", "quickstart", NODES="n1")[0] == 0
    assert not any("getent" in line for line in cluster.calls("srun"))


@pytest.mark.parametrize("failing", [{"STATUS": "1"}, {"JOINED": "1"}])
def test_failed_slurm_job_is_requeued_three_times(cluster, failing):
    for attempt in (1, 2, 3):
        status, output = cluster.run("slurm.sh", "quickstart", **failing)
        assert status == 0 and f"attempt {attempt} of 3" in output
        assert cluster.calls("scontrol requeue") == ["scontrol requeue 7"]
    status, output = cluster.run("slurm.sh", "quickstart", **failing)
    assert status == 1 and not missing_parts(output.splitlines()[-1], 3)
    assert not cluster.calls("scontrol requeue")


def test_node_without_gpus_keeps_the_gpu_count_of_the_config(cluster):
    assert cluster.run("slurm.sh", "quickstart", SLURM_GPUS_ON_NODE="0")[0] == 0
    (driver,) = cluster.calls("python -m verl.trainer.main_ppo")
    assert "n_gpus_per_node" not in driver and "trainer.nnodes=2" in driver


def test_missing_gpus_end_a_slurm_job_before_ray_starts(cluster):
    status, _ = cluster.run("slurm.sh", "quickstart", NODES_STATUS="2")
    assert status == 2
    assert not cluster.calls("srun --nodes=1 --ntasks=1 --cpu-bind=none --nodelist=n1 --export")
    assert not cluster.calls("scontrol requeue")


def test_usage_errors_are_not_retried(cluster):
    assert cluster.run("slurm.sh", "quickstart", STATUS="2")[0] == 2
    assert not cluster.calls("scontrol requeue")


def test_slurm_job_is_requeued_before_its_time_limit(cluster):
    process = cluster.start("slurm.sh", "quickstart", HANGS="1")
    deadline = time.monotonic() + 30
    while not cluster.calls("python -m") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert cluster.calls("scontrol requeue") == ["scontrol requeue 7"]


# ---------------------------------------------------------------- Ray jobs


class FakeJobs:
    """Jobs of a Ray cluster. Each has a list of status answers; the last one is repeated."""

    def __init__(self, *jobs: list[Any]) -> None:
        self.jobs = jobs
        self.submitted: list[str] = []
        self.stopped: list[str] = []

    def submit_job(self, *, entrypoint: str, runtime_env: dict[str, Any]) -> str:
        assert runtime_env["working_dir"] == str(ROOT) and "runs" in runtime_env["excludes"]
        self.submitted.append(entrypoint)
        return str(len(self.submitted) - 1)

    def get_job_info(self, job: str) -> Any:
        statuses = self.jobs[int(job)]
        status_or_error = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        if isinstance(status_or_error, BaseException):
            raise status_or_error
        status, code = status_or_error
        return SimpleNamespace(status=status, driver_exit_code=code)

    def get_job_logs(self, _job: str) -> str:
        return "12 succeeded, exit code 2\n"

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)


SUCCEEDED = (JobStatus.SUCCEEDED, 0)
FAILED = (JobStatus.FAILED, 1)
RUNNING = (JobStatus.RUNNING, None)


@pytest.fixture
def submit(monkeypatch):
    """Return a function that runs the script: exit status and submitted jobs."""

    def run(*jobs: list[Any]) -> tuple[int, FakeJobs]:
        cluster = FakeJobs(*jobs)
        monkeypatch.setattr(ray_job, "connect", lambda _address: cluster)
        return ray_job.main(["quickstart", "trainer.seed=3"]), cluster

    monkeypatch.setattr(ray_job, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    return run


@pytest.mark.parametrize(
    ("jobs", "status"),
    [
        ([[SUCCEEDED]], 0),
        ([[RUNNING, ConnectionError("restarts"), RUNNING, SUCCEEDED]], 0),
        ([[FAILED], [RUNNING, FAILED], [SUCCEEDED]], 0),
        ([[FAILED]] * 4, 1),
        ([[(JobStatus.FAILED, 2)]], 2),
        ([[(JobStatus.FAILED, None)], [SUCCEEDED]], 0),
        ([[(JobStatus.STOPPED, None)]], 1),
    ],
)
def test_failed_ray_job_is_submitted_again(submit, jobs, status, capsys):
    actual, cluster = submit(*jobs)
    assert (actual, len(cluster.submitted)) == (status, len(jobs))
    for command in cluster.submitted:
        assert "--config-name quickstart trainer.resume_mode=auto trainer.seed=3" in command
    assert capsys.readouterr().out.count("12 succeeded") == len(jobs), "a log line is repeated"


def test_interrupt_stops_the_ray_job(submit, monkeypatch):
    stopped = []
    monkeypatch.setattr(FakeJobs, "stop_job", lambda _, job: stopped.append(job))
    with pytest.raises(KeyboardInterrupt):
        submit([RUNNING, KeyboardInterrupt()])
    assert stopped == ["0"]


def test_unreachable_cluster_ends_the_script(submit, monkeypatch):
    monkeypatch.setattr(ray_job, "ANSWER_TIMEOUT_S", 0.0)
    with pytest.raises(ray_job.ClusterUnreachableError, check=mentions("job 0")):
        submit([ConnectionError("no route")])


@pytest.mark.parametrize(
    "address", ["junk", "127.0.0.1:6379", "ray://head:10001", "http://", "http://h:x", "auto", " "]
)
def test_ray_job_needs_the_url_of_a_dashboard(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError):
        ray_job.main(["quickstart"])


def test_ray_job_without_a_server_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    with pytest.raises(UsageError):
        ray_job.main(["quickstart"])


def test_ray_job_passes_variables_and_named_data(monkeypatch):
    for name in ray_job.PASSED_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALFWORLD_DATA", "/games")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    plain = ray_job.build_runtime_env(["trainer.seed=3"], [])
    assert plain["env_vars"] == {"ALFWORLD_DATA": "/games"} and "data" in plain["excludes"]
    named = ray_job.build_runtime_env(["data.train_files=[data/a.jsonl]"], ["WANDB_API_KEY"])
    assert named["env_vars"]["WANDB_API_KEY"] == "secret" and "data" not in named["excludes"]
    with pytest.raises(SystemExit):
        ray_job.main(["quickstart", "--env", "NOT_SET_ANYWHERE"])


def test_ray_job_without_an_address_names_the_variable(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SystemExit):
        ray_job.main(["quickstart"])
    assert "RAY_ADDRESS" in capsys.readouterr().err


# ---------------------------------------------------------------- manifests


@pytest.mark.parametrize(
    ("arguments", "training"),
    [
        (["2", "8", "alfworld_qwen2.5_7b_2nodes"], 2),
        (["2", "8", "alfworld_qwen2.5_7b_2nodes_apart"], 1),
        (["5", "8", "alfworld_qwen2.5_7b_2nodes_apart", "actor_rollout_ref.rollout.nnodes=3"], 2),
        (["2", "8", "alfworld_qwen2.5_7b_2nodes_apart", "no.such=1"], 2),
        (["2", "0", "relay_sft"], 2),
        (["2", "0", "quickstart"], 2),
    ],
)
def test_engine_only_nodes_are_not_training_nodes(arguments, training):
    assert count_training_nodes.compute_training_nodes(arguments) == training


def test_gpu_configuration_needs_an_allocation_with_gpus():
    expected = has_problem("does_not_fit", "trainer.device", "--gpus-per-node=8")
    with pytest.raises(UsageError, check=expected):
        count_training_nodes.compute_training_nodes(["2", "0", "alfworld_qwen2.5_7b_2nodes"])


@pytest.mark.parametrize(
    "arguments",
    [[], ["2"], ["2", "8"], ["x", "8", "quickstart"], ["0", "8", "quickstart"], ["1", "y"]],
)
def test_wrong_arguments_have_status_two(arguments):
    for main in (count_training_nodes.compute_training_nodes, wait_for_nodes.main):
        with pytest.raises(SystemExit) as ended:
            main(["0", *arguments] if main is wait_for_nodes.main else arguments)
        assert ended.value.code == 2


def test_kubernetes_job_has_a_valid_configuration():
    job = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())["spec"]
    arguments = job["entrypoint"].split()
    assert arguments[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    cfg = load_config(arguments[4], arguments[5:])
    assert isinstance(cfg, PPOConfig)
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == cfg.trainer.nnodes
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(cfg.trainer.n_gpus_per_node)
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(cfg.trainer.default_local_dir.startswith(f"{mount}/") for mount in mounts)
    pinned = (ROOT / "requirements" / "gpu.txt").read_text()
    assert f"ray=={job['rayClusterSpec']['rayVersion']}" in pinned


def test_cloud_job_has_valid_shell_scripts():
    job = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=job[part], text=True, check=True)
    assert isinstance(load_config(job["envs"]["CONFIG"]), PPOConfig)


def test_image_copies_existing_files():
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert copied == ["requirements", "."] and (ROOT / "requirements" / "gpu.txt").is_file()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "data", "runs"} <= set(ignored)
