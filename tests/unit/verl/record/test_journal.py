"""The journal: where trajectories go, which plays the trackers see, and when all of it is there."""

import threading
from pathlib import Path

import pytest
import torch

from agent_system.multi_turn_rollout import TrajectoryCollector
from tests.helpers.play import make_config, make_world
from tests.helpers.tiny_model import make_tiny_tokenizer
from tests.helpers.trainer_fakes import make_fake_run
from verl.record.journal import Journal
from verl.record.rollout_log import rollout_lines, token_lines
from verl.record.run_dir import RunDirectory
from verl.record.tracking import Tracking
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


class Texts(Tracking):
    """Stands for the trackers; keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list = []

    def log_texts(self, name, columns, rows, step) -> None:
        self.sent.append((name, columns, rows, step))


@pytest.fixture(scope="module")
def batch(tokenizer):
    """Six plays with credit."""
    config = make_config(n=2)
    group, envs, _ = make_world(tokenizer, config)
    collector = TrajectoryCollector(config, tokenizer)
    batch = collector.multi_turn_loop(envs.gen_batch(1, 3), group, envs)
    collector.close()
    batch.batch["advantages"] = torch.randn(batch.batch["responses"].shape)
    return batch


@pytest.fixture
def journal(tokenizer, tmp_path: Path):
    """An open journal."""
    with RunDirectory(tmp_path / "run").open({}) as run:
        journal = Journal(run, make_config(), tokenizer)
        journal.open(None, 10)
        yield journal


@pytest.fixture
def held_up(monkeypatch) -> threading.Event:
    """Until this is set, no plays are written."""
    may_write = threading.Event()
    write = RunDirectory.write_rollouts

    def late(*arguments) -> Path:
        assert may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(RunDirectory, "write_rollouts", late)
    return may_write


def test_files_hold_what_was_reported_whatever_becomes_of_the_table(
    tokenizer, batch, journal, held_up, tmp_path: Path
):
    jsonl.write(tmp_path / "plays", rollout_lines(batch, tokenizer))
    jsonl.write(tmp_path / "tokens", token_lines(batch, tokenizer))
    table = batch.select()
    journal.log_rollouts(1, table)
    metrics = {"actor/loss": 1.0}
    journal.log_step(1, metrics)
    table.batch["advantages"] = torch.zeros_like(table.batch["advantages"])
    table.pop(["response_mask"], ["steps"])
    metrics["actor/loss"] = 2.0
    held_up.set()
    journal.finish_run()
    run = journal.run
    assert run.rollout_path(1).read_bytes() == (tmp_path / "plays").read_bytes()
    assert run.token_path(1).read_bytes() == (tmp_path / "tokens").read_bytes()
    (line,) = jsonl.read(run.metrics_path)
    assert line["actor/loss"] == 1.0
    assert run.report_path.exists()


def test_what_writing_raises_ends_the_run_at_the_next_report(batch, journal, monkeypatch):
    def full(*_) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(RunDirectory, "write_rollouts", full)
    journal.log_rollouts(1, batch)
    with pytest.raises(OSError, match="no space left"):
        journal.flush()
    with pytest.raises(OSError, match="no space left"):
        journal.log_step(1, {})
    with pytest.raises(OSError, match="no space left"):
        journal.finish_run()
    journal.finish_run()
    assert not journal.run.metrics_path.exists(), "the metrics of a step come after its plays"


def test_a_checkpoint_counts_when_what_it_claims_is_written(batch, journal, held_up, tmp_path):
    checkpoints = CheckpointManager(tmp_path / "checkpoints", background=True)
    trainer, calls, _ = make_fake_run()
    trainer.journal = journal
    trainer.checkpoints = checkpoints
    trainer.global_step = 1
    journal.log_rollouts(1, batch)
    journal.log_step(1, {})
    trainer.save()
    assert calls[-1][0] == "save"
    journal.log_step(2, {})
    assert checkpoints._running_save is not None
    with pytest.raises(TimeoutError):
        checkpoints._running_save[1].get_result(0.2)
    assert checkpoints.find_checkpoints() == {}
    held_up.set()
    checkpoints.wait(60)
    assert list(checkpoints.find_checkpoints()) == [1]
    assert journal.run.rollout_path(1).exists()
    assert 1 in [record["step"] for record in jsonl.read(journal.run.metrics_path)]
    journal.finish_run()


@pytest.mark.parametrize("history", ["append", "window"])
def test_rollouts_go_to_a_second_place_and_a_few_plays_to_the_trackers(
    tokenizer, history, tmp_path: Path
):
    config = make_config(history=history, n=1)
    trainer = config.trainer
    trainer.rollout_data_dir, trainer.validation_data_dir = (
        str(tmp_path / "train"),
        str(tmp_path / "val"),
    )
    trainer.log_val_generations = 2
    group, envs, _ = make_world(tokenizer, config)
    collector = TrajectoryCollector(config, tokenizer)
    batch = collector.multi_turn_loop(envs.gen_batch(1, 3), group, envs, is_train=False)
    collector.close()
    journal = Journal(RunDirectory(tmp_path / "run").open({}), config, tokenizer)
    texts = Texts()
    journal.tracking = texts
    journal.log_rollouts(4, batch)
    journal.flush()
    assert texts.sent == []
    tokens = list(jsonl.read(tmp_path / "run" / "tokens" / "4.jsonl"))
    assert [line["traj_uid"] for line in tokens] == list(batch.non_tensor_batch["traj_uid"])
    (tmp_path / "run" / "tokens" / "4.jsonl").unlink()
    journal.log_rollouts(4, batch, validation=True)
    journal.flush()
    # Of held-out plays the trainer scores no tokens.
    assert not list((tmp_path / "run" / "tokens").iterdir())
    for place, name in (("train", "4.jsonl"), ("val", "val_4.jsonl")):
        own, second = tmp_path / "run" / "rollouts" / name, tmp_path / place / "4.jsonl"
        assert list(jsonl.read(second)) == list(jsonl.read(own)) and len(
            list(jsonl.read(own))
        ) == len(batch)
    ((name, columns, plays, step),) = texts.sent
    assert (name, columns, step) == ("val/plays", ["task", "return", "play"], 4)
    assert len(plays) == 2 and all(reward == "1" for _, reward, _ in plays)
    assert plays[0][2].count("> You are at") == plays[0][2].count("<action>") >= 3
