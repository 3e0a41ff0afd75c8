"""A supervised run continues only from a valid checkpoint of the same rows."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.refusals import has_problem
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.load import load_config
from verl.config.schema import SFTConfig
from verl.config.schema.model import OptimConfig
from verl.config.settings import ConfigError
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.trainer.launch.sft import run_sft
from verl.trainer.sft.resume import choose_sft_checkpoint
from verl.trainer.sft.rows import SFTRow
from verl.trainer.sft.trainer import SFTTrainer
from verl.utils.checkpoint import CheckpointManager
from verl.workers.engine import TrainEngine

WEIGHTS = (0.0, 1.0, 0.5)
ROWS = [SFTRow((5, 6, 7), WEIGHTS), SFTRow((8, 9, 10), WEIGHTS)]
BATCHES = [[0], [1], [0], [1]]
OTHER_ROWS = {
    "token id": [ROWS[0], SFTRow((8, 9, 11), WEIGHTS)],
    "loss weight": [ROWS[0], SFTRow((8, 9, 10), (0.0, 1.0, 1.0))],
    "order": ROWS[::-1],
    "number": [*ROWS, ROWS[0]],
    "border": [SFTRow((5, 6), (0.0, 1.0)), SFTRow((7, 8, 9, 10), (0.5, 0.0, 1.0, 0.5))],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a directory with a policy, and with a checkpoint of two of four steps."""
    root = tmp_path_factory.mktemp("saved")
    policy = make_tiny_policy(root / "policy", hidden=16, layers=1)
    engine = TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu", optim=OptimConfig())
    checkpoints = CheckpointManager(root / "checkpoints")
    SFTTrainer(engine, ROWS, BATCHES[:2], save_freq=2, checkpoints=checkpoints).fit(lambda _: None)
    return root


def choose(saved, *overrides, rows=ROWS, batches=BATCHES):
    cfg = load_config("sft_trainer", ["data.train_files=[a.jsonl]", *overrides], SFTConfig)
    return choose_sft_checkpoint(cfg, saved / "checkpoints", rows, batches)


@pytest.mark.parametrize("rows", OTHER_ROWS.values(), ids=OTHER_ROWS.keys())
def test_checkpoint_of_other_rows_is_refused(saved, rows):
    with pytest.raises(
        ConfigError, check=has_problem("conflicting_keys", "data.train_files", "global_step_2")
    ):
        choose(saved, rows=rows)
    with pytest.raises(ConfigError, check=has_problem("conflicting_keys", "data.episodes")):
        choose(saved, "data.train_files=[]", rows=rows)
    assert choose(saved, "trainer.resume_mode=disable", rows=rows) is None


@pytest.mark.parametrize(
    ("batches", "warning"),
    [
        (BATCHES, ""),
        ([*BATCHES, [0, 1]], ""),
        ([[1], [0], [1], [0]], "data.tokens_per_batch"),
        ([[0, 1], [0, 1], [0, 1]], "data.tokens_per_batch"),
        (BATCHES[:2], "trainer.total_epochs"),
        ([[0, 1]], "trainer.total_epochs"),
    ],
)
def test_changed_plan_of_batches_is_warned_of(saved, batches, warning, caplog):
    with caplog.at_level(logging.WARNING):
        checkpoint = choose(saved, batches=batches)
    assert checkpoint == saved / "checkpoints" / "global_step_2"
    assert (warning in caplog.text) if warning else not caplog.text


def test_checkpoint_without_digests_is_accepted(saved, tmp_path):
    def write(directory):
        (directory / "engine.json").write_text(json.dumps({"format": 2, "steps": 1}))

    CheckpointManager(tmp_path / "checkpoints").save(1, write, {"global_step": 1})
    checkpoint = choose(tmp_path, rows=OTHER_ROWS["order"])
    assert checkpoint == tmp_path / "checkpoints" / "global_step_1"


@pytest.mark.parametrize("file", ["shard-00001-model-00001-of-00004.safetensors", "engine.json"])
def test_damaged_checkpoint_is_refused(saved, tmp_path, file):
    checkpoint = Path(shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints"))
    checkpoint /= "global_step_2"
    data = (checkpoint / file).read_bytes()
    (checkpoint / file).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    overrides = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    with pytest.raises(ConfigError, check=has_problem("altered_file", "", file)):
        choose(tmp_path, *overrides)


def test_run_on_other_data_does_not_return_the_policy_of_the_first_run(saved, tmp_path):
    def run(name, *overrides):
        data = [{"input_ids": [5, 6, ord(name)], "loss_weights": [0, 1, 1]}] * 4
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, data)))
        words = {
            "model.path": saved / "policy",
            "model.save_path": tmp_path / f"made-{name}",
            "data.train_files": f"[{tmp_path}/{name}.jsonl]",
            "data.tokens_per_batch": 6,
            "trainer.default_local_dir": tmp_path / "run",
            "trainer.save_freq": 1,
            "trainer.device": "cpu",
            "trainer.logger": "[]",
        }
        overrides = [*(f"{key}={value}" for key, value in words.items()), *overrides]
        made = run_sft(load_config("sft_trainer", overrides, SFTConfig))
        return load_file(made / "model.safetensors")

    first = run("A")
    with pytest.raises(ConfigError, check=has_problem("conflicting_keys", "data.train_files")):
        run("B")
    assert not (tmp_path / "made-B").exists()
    second = run("B", "trainer.resume_mode=disable")
    assert any(not bool((second[name] == first[name]).all()) for name in first)
