"""The job scripts for clusters, with a scheduler and a Ray that only write down what they are asked
for.
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

from scripts.cluster import ray_job, training_nodes, wait_for_nodes
from tests.helpers.jobs import ROOT
from tests.helpers.refusals import mentions
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


class Cluster:
    """A checkout with stand-ins for what the scripts call, which log their arguments."""

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

    def start(self, script: str, *words: str, **variables: str) -> subprocess.Popen[str]:
        command = ["bash", f"scripts/cluster/{script}", *words]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, *words: str, **variables: str) -> tuple[int, str]:
        """Exit status and what was printed."""
        self.log.write_text("")
        process = self.start(script, *words, **variables)
        printed, _ = process.communicate(timeout=60)
        return process.returncode, printed

    def calls(self, beginning: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(beginning)]


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


# ---------------------------------------------------------------- Slurm


def test_a_slurm_job_starts_ray_where_other_nodes_reach_it_and_the_driver(cluster):
    status, _ = cluster.run("slurm.sh", "quickstart", "trainer.seed=3")
    assert status == 0
    (asked,) = cluster.calls("srun --nodes=1 --ntasks=1 --nodelist=n2 getent")
    assert asked.endswith("getent ahostsv4 n1")
    head, worker = sorted(line for line in cluster.calls("srun") if "ray start" in line)
    assert "--nodelist=n1" in head and "--head --node-ip-address=10.0.0.1" in head
    assert "--nodelist=n2" in worker and "--address=10.0.0.1:6379" in worker
    (waited,) = cluster.calls("python scripts/cluster/wait_for_nodes.py")
    assert waited.endswith(" 2")
    (driver,) = cluster.calls("python -m verl.trainer.main_ppo")
    assert "--config-name quickstart trainer.nnodes=2 trainer.n_gpus_per_node=8" in driver
    assert "trainer.resume_mode=auto" in driver and driver.endswith("trainer.seed=3")


@pytest.mark.parametrize("address", ["127.0.1.1", "none"])
def test_an_address_that_only_the_head_knows_is_refused(cluster, address):
    status, printed = cluster.run("slurm.sh", "quickstart", ADDRESS=address)
    assert status == 2 and "RLVCR_HEAD_IP" in printed
    assert not cluster.calls("python")


def test_somebody_may_know_the_address_better(cluster):
    status, _ = cluster.run("slurm.sh", "quickstart", ADDRESS="127.0.1.1", RLVCR_HEAD_IP="10.0.0.9")
    assert status == 0 and any("10.0.0.9:6379" in line for line in cluster.calls("srun"))


def test_one_node_asks_nobody_for_its_address(cluster):
    assert cluster.run("slurm.sh", "quickstart", NODES="n1")[0] == 0
    assert not any("getent" in line for line in cluster.calls("srun"))


@pytest.mark.parametrize("failing", [{"STATUS": "1"}, {"JOINED": "1"}])
def test_a_slurm_job_that_fails_is_queued_again_three_times(cluster, failing):
    for attempt in (1, 2, 3):
        status, printed = cluster.run("slurm.sh", "quickstart", **failing)
        assert status == 0 and f"attempt {attempt} of 3" in printed
        assert cluster.calls("scontrol requeue") == ["scontrol requeue 7"]
    status, printed = cluster.run("slurm.sh", "quickstart", **failing)
    assert status == 1 and "3 further attempts" in printed
    assert not cluster.calls("scontrol requeue")


def test_without_gpus_the_configuration_keeps_its_own_number(cluster):
    assert cluster.run("slurm.sh", "quickstart", SLURM_GPUS_ON_NODE="0")[0] == 0
    (driver,) = cluster.calls("python -m verl.trainer.main_ppo")
    assert "n_gpus_per_node" not in driver and "trainer.nnodes=2" in driver


def test_missing_gpus_end_a_slurm_job_before_ray_starts(cluster):
    status, _ = cluster.run("slurm.sh", "quickstart", NODES_STATUS="2")
    assert status == 2
    assert not cluster.calls("srun --nodes=1 --ntasks=1 --nodelist=n1 --export")
    assert not cluster.calls("scontrol requeue")


def test_wrong_settings_are_not_tried_again(cluster):
    assert cluster.run("slurm.sh", "quickstart", STATUS="2")[0] == 2
    assert not cluster.calls("scontrol requeue")


def test_before_its_time_limit_a_slurm_job_asks_to_be_queued_again(cluster):
    process = cluster.start("slurm.sh", "quickstart", HANGS="1")
    deadline = time.monotonic() + 30
    while not cluster.calls("python -m") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "time limit ahead" in printed
    assert cluster.calls("scontrol requeue") == ["scontrol requeue 7"]


# ---------------------------------------------------------------- Ray jobs


class Jobs:
    """A Ray cluster's jobs: of each the answers to who asks how it goes, the last one for ever."""

    def __init__(self, *jobs: list[Any]) -> None:
        self.jobs = jobs
        self.submitted: list[str] = []
        self.stopped: list[str] = []

    def submit_job(self, *, entrypoint: str, runtime_env: dict[str, Any]) -> str:
        assert runtime_env["working_dir"] == str(ROOT) and "runs" in runtime_env["excludes"]
        self.submitted.append(entrypoint)
        return str(len(self.submitted) - 1)

    def get_job_info(self, job: str) -> Any:
        answers = self.jobs[int(job)]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        status, code = answer
        return SimpleNamespace(status=status, driver_exit_code=code)

    def get_job_logs(self, _job: str) -> str:
        return "12 succeeded, exit code 2\n"

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)


WON = (JobStatus.SUCCEEDED, 0)
LOST = (JobStatus.FAILED, 1)
RUNS = (JobStatus.RUNNING, None)


@pytest.fixture
def submit(monkeypatch):
    """Exit status of the script, and the jobs it submitted."""

    def run(*jobs: list[Any]) -> tuple[int, Jobs]:
        cluster = Jobs(*jobs)
        monkeypatch.setattr(ray_job, "connect", lambda _address: cluster)
        return ray_job.main(["quickstart", "trainer.seed=3"]), cluster

    monkeypatch.setattr(ray_job, "PAUSE_S", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    return run


@pytest.mark.parametrize(
    ("jobs", "status"),
    [
        ([[WON]], 0),
        ([[RUNS, ConnectionError("restarts"), RUNS, WON]], 0),
        ([[LOST], [RUNS, LOST], [WON]], 0),
        ([[LOST]] * 4, 1),
        ([[(JobStatus.FAILED, 2)]], 2),
        ([[(JobStatus.FAILED, None)], [WON]], 0),
        ([[(JobStatus.STOPPED, None)]], 1),
    ],
)
def test_a_ray_job_that_fails_is_submitted_again(submit, jobs, status, capsys):
    found, cluster = submit(*jobs)
    assert (found, len(cluster.submitted)) == (status, len(jobs))
    for command in cluster.submitted:
        assert "--config-name quickstart trainer.resume_mode=auto trainer.seed=3" in command
    assert capsys.readouterr().out.count("12 succeeded") == len(jobs), "no line comes twice"


def test_whoever_stops_following_stops_the_job(submit, monkeypatch):
    stopped = []
    monkeypatch.setattr(Jobs, "stop_job", lambda _, job: stopped.append(job))
    with pytest.raises(KeyboardInterrupt):
        submit([RUNS, KeyboardInterrupt()])
    assert stopped == ["0"]


def test_a_cluster_that_is_gone_is_not_asked_for_ever(submit, monkeypatch):
    monkeypatch.setattr(ray_job, "NO_ANSWER_TIMEOUT_S", 0.0)
    with pytest.raises(ray_job.ClusterUnreachable, check=mentions("job 0")):
        submit([ConnectionError("no route")])


@pytest.mark.parametrize(
    "address", ["junk", "127.0.0.1:6379", "ray://head:10001", "http://", "http://h:x", "auto", " "]
)
def test_a_ray_job_needs_the_url_of_a_dashboard(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError):
        ray_job.main(["quickstart"])


def test_a_ray_job_where_nothing_answers(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    with pytest.raises(UsageError):
        ray_job.main(["quickstart"])


def test_a_ray_job_passes_variables_and_the_data_that_is_named(monkeypatch):
    for name in ray_job.PASSED_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALFWORLD_DATA", "/games")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    plain = ray_job.runtime_env_of(["trainer.seed=3"], [])
    assert plain["env_vars"] == {"ALFWORLD_DATA": "/games"} and "data" in plain["excludes"]
    named = ray_job.runtime_env_of(["data.train_files=[data/a.jsonl]"], ["WANDB_API_KEY"])
    assert named["env_vars"]["WANDB_API_KEY"] == "secret" and "data" not in named["excludes"]
    with pytest.raises(SystemExit):
        ray_job.main(["quickstart", "--env", "NOT_SET_ANYWHERE"])


def test_a_ray_job_without_an_address_says_which_variable(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SystemExit):
        ray_job.main(["quickstart"])
    assert "RAY_ADDRESS" in capsys.readouterr().err


# ---------------------------------------------------------------- manifests


@pytest.mark.parametrize(
    ("words", "training"),
    [
        (["2", "8", "alfworld_qwen2.5_7b_2nodes"], 2),
        (["2", "8", "alfworld_qwen2.5_7b_2nodes_apart"], 1),
        (["5", "8", "alfworld_qwen2.5_7b_2nodes_apart", "actor_rollout_ref.rollout.nnodes=3"], 2),
        (["2", "8", "alfworld_qwen2.5_7b_2nodes_apart", "no.such=1"], 2),
        (["2", "0", "relay_sft"], 2),
        (["2", "0", "quickstart"], 2),
    ],
)
def test_nodes_for_engines_alone_do_not_train(words, training):
    assert training_nodes.main(words) == training


def test_a_configuration_for_gpus_needs_an_allocation_with_gpus():
    with pytest.raises(UsageError) as refused:
        training_nodes.main(["2", "0", "alfworld_qwen2.5_7b_2nodes"])
    assert "--gpus-per-node=8" in str(refused.value)


@pytest.mark.parametrize(
    "words", [[], ["2"], ["2", "8"], ["x", "8", "quickstart"], ["0", "8", "quickstart"], ["1", "y"]]
)
def test_wrong_arguments_have_status_two(words):
    for main in (training_nodes.main, wait_for_nodes.main):
        with pytest.raises(SystemExit) as ended:
            main(["0", *words] if main is wait_for_nodes.main else words)
        assert ended.value.code == 2


def test_the_kubernetes_job_runs_what_the_framework_takes():
    job = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())["spec"]
    words = job["entrypoint"].split()
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    cfg = load_config(words[4], words[5:])
    assert isinstance(cfg, PPOConfig)
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == cfg.trainer.nnodes
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(cfg.trainer.n_gpus_per_node)
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(cfg.trainer.default_local_dir.startswith(f"{mount}/") for mount in mounts)
    pinned = (ROOT / "requirements" / "gpu.txt").read_text()
    assert f"ray=={job['rayClusterSpec']['rayVersion']}" in pinned


def test_the_cloud_job_is_a_script_that_bash_reads():
    job = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=job[part], text=True, check=True)
    assert isinstance(load_config(job["envs"]["CONFIG"]), PPOConfig)


def test_the_image_copies_what_there_is():
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert copied == ["requirements", "."] and (ROOT / "requirements" / "gpu.txt").is_file()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "data", "runs"} <= set(ignored)
