"""The job scripts for clusters, with a scheduler and a Ray that only write down what they are asked
for.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.helpers.jobs import ROOT
from verl.trainer.config.load import load_config
from verl.trainer.config.schema import PPOConfig

CLUSTER = ROOT / "scripts" / "cluster"
STUB = '#!/bin/sh\necho "$(basename "$0") $*" >> "$LOG"\n'
SRUN = r"""#!/bin/sh
echo "srun $*" >> "$LOG"
while [ "${1#--}" != "$1" ]; do
    shift
done
case "$1" in
    getent) echo "$ADDRESS STREAM $3" ;;
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
        self.stub("ray", STUB)
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
    assert not list(cluster.folder.glob("rlvcr-7-*")), "the token goes with the job"


def test_an_address_that_only_the_head_knows_is_refused(cluster):
    status, printed = cluster.run("slurm.sh", "quickstart", ADDRESS="127.0.1.1")
    assert status == 2 and "RLVCR_HEAD_IP" in printed and "127.0.1.1" in printed
    assert not cluster.calls("python")
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

RAY = r"""#!/bin/sh
echo "ray $*" >> "$LOG"
echo "mode $RAY_AUTH_MODE" >> "$LOG"
[ "$2" != status ] || sed -n "$(grep -c 'job submit' "$LOG")p" "$ANSWERS"
"""


@pytest.mark.parametrize(
    ("answers", "status", "submitted"),
    [
        (["SUCCEEDED"], 0, 1),
        (["FAILED", "FAILED", "SUCCEEDED"], 0, 3),
        (["FAILED"] * 4, 1, 4),
        (["FAILED: Job entrypoint command failed with exit code 2,"], 1, 1),
        (["STOPPED"], 1, 1),
    ],
)
def test_a_ray_job_that_fails_is_submitted_again(cluster, answers, status, submitted):
    cluster.stub("ray", RAY)
    (cluster.folder / "answers").write_text("\n".join(answers))
    more = {"RAY_ADDRESS": "http://head:8265", "ANSWERS": str(cluster.folder / "answers")}
    found, _ = cluster.run("ray_job.sh", "quickstart", "trainer.seed=3", **more)
    calls = cluster.calls("ray job submit")
    assert (found, len(calls)) == (status, submitted)
    assert all(call.endswith("trainer.resume_mode=auto trainer.seed=3") for call in calls)
    names = {call.split("--submission-id ")[1].split()[0] for call in calls}
    assert len(names) == submitted, "Ray refuses a name that it had before"
    assert set(cluster.calls("mode")) == {"mode token"}


def test_a_ray_job_without_an_address_says_which_variable(cluster):
    status, printed = cluster.run("ray_job.sh", "quickstart")
    assert status != 0 and "RAY_ADDRESS" in printed


# ---------------------------------------------------------------- manifests


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
