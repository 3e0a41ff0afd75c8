"""The documented command makes the quickstart's policy again, here from fewer demonstrations."""

import json
from pathlib import Path

import pytest

from tests.helpers.jobs import start
from tests.helpers.smoke_job import NEEDS_VLLM, format_cold_start
from verl.config.compose import POLICIES_DIR
from verl.record.tracking import read_metrics

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(300)]
SHIPPED = POLICIES_DIR / "quickstart"
# The tokenizer is trained on the demonstrations, and has fewer tokens if they are few.
VOCABULARY_KEYS = {"vocab_size", "eos_token_id", "pad_token_id", "bos_token_id"}
COLD_START = ["data.episodes=96", "data.val_episodes=16", "trainer.total_epochs=2"]
ONE_STEP = [
    "data.train_batch_size=4",
    "env.rollout.n=4",
    "env.val_tasks=4",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
]


def read_model_config(directory: Path) -> dict:
    config = json.loads((directory / "config.json").read_text())
    return {key: value for key, value in config.items() if key not in VOCABULARY_KEYS}


def test_cold_start_makes_a_policy_like_the_shipped_one(tmp_path):
    made = tmp_path / "made"
    directories = [f"data.data_dir={tmp_path}", f"trainer.default_local_dir={tmp_path / 'sft'}"]
    overrides = [
        f"actor_rollout_ref.model.path={made}",
        "cold_start.enable=true",
        format_cold_start([*COLD_START, *directories]),
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    arguments = [*overrides, *ONE_STEP, "--config-name", "quickstart"]
    job = start(arguments, tmp_path / "log.txt")
    job.finish(240)
    assert read_model_config(made) == read_model_config(SHIPPED)
    made_files = {file.name for file in made.iterdir()}
    assert made_files >= {file.name for file in SHIPPED.iterdir() if file.name != "SHA256SUMS"}
    losses = [
        record["val/loss"] for record in read_metrics(tmp_path / "sft") if "val/loss" in record
    ]
    assert losses[-1] < 0.8 * losses[0]
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1]
