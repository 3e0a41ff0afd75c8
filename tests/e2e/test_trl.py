"""Twenty questions end to end: the training script, TRL with colocated vLLM on CPU, and
``main_ppo``.
"""

import json
import math
import re
import sys

import pytest

from tests.helpers.jobs import Job, start
from verl.record.tracking import read_metrics

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TIMEOUT_S = 300
TINY = [
    "--words=8",
    "--turns=4",
    "--episodes=200",
    "--epochs=1",
    "--steps=2",
    "--groups=2",
    "--updates=2",
    "--games=8",
]


@pytest.fixture(scope="module")
def trained_directory(tmp_path_factory):
    """Run the training script at its smallest size; return its directory and its output."""
    directory = tmp_path_factory.mktemp("twenty_questions")
    command = [sys.executable, "scripts/train_twenty_questions.py", f"--out={directory}", *TINY]
    job = Job(command, directory / "log.txt")
    job.finish(TIMEOUT_S)
    return directory, (directory / "log.txt").read_text()


def test_script_prints_success_before_and_after_training(trained_directory):
    directory, output = trained_directory
    line = r"success \d+\.\d% on training words, \d+\.\d% on held-out words; \d+\.\d turns per game"
    assert re.search(rf"^before: {line}$.*^after: {line}$", output, re.MULTILINE | re.DOTALL)
    result = json.loads((directory / "result.json").read_text())
    for when in ("before", "after"):
        assert all(math.isfinite(value) for value in result[when].values())
    assert (directory / "trained" / "model.safetensors").is_file()


def test_trained_policy_continues_under_main_ppo(trained_directory, tmp_path):
    overrides = [
        "--config-name=twenty_questions",
        f"actor_rollout_ref.model.path={trained_directory[0] / 'imitation'}",
        "actor_rollout_ref.rollout.name=hf",
        "data.train_batch_size=2",
        "env.rollout.n=2",
        "env.max_steps=4",
        "env.twenty_questions={words:[dog,cat,cow,pig,lion,apple,car,piano]}",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.num_threads=1",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    ]
    start(overrides, tmp_path / "log.txt").finish(TIMEOUT_S)
    metrics = read_metrics(tmp_path / "run")
    assert [record["step"] for record in metrics] == [1, 2]
    assert all(math.isfinite(record["episode/success_rate"]) for record in metrics)


def test_colocated_vllm_follows_the_weights_of_the_trainer(tmp_path):
    """After a change of the weights, the engine differs without a sync and agrees after it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    if torch.cuda.is_available():
        pytest.skip("the CPU engine")
    job = Job(
        [sys.executable, "-m", "tests.helpers.trl_vllm", str(tmp_path / "work")],
        tmp_path / "log.txt",
    )
    job.finish(TIMEOUT_S)
    gaps = json.loads(re.findall(r"^\{.*\}$", (tmp_path / "log.txt").read_text(), re.MULTILINE)[-1])
    assert max(gaps["start"], gaps["synced"]) < 0.1, "above the tolerance of bfloat16, TRL's dtype"
    assert gaps["stale"] > 1.0, "the change of weights is too small to be detected"
    assert gaps["steps"] == 1
