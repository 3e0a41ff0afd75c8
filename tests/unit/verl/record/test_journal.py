"""Tests of the journal: trajectory files, texts for the trackers, and completeness."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch

from agent_system.multi_turn_rollout import TrajectoryCollector
from tests.helpers.number_line_world import make_config, make_world
from tests.helpers.refusals import list_logged
from tests.helpers.tiny_model import make_tiny_tokenizer
from tests.helpers.trainer_fakes import make_fake_run
from verl.record.journal import Journal
from verl.record.rollout_log import format_rollout_lines, format_token_lines
from verl.record.run_dir import RunDirectory
from verl.record.tracking import Tracking, read_metrics
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


class FakeTracking(Tracking):
    """Records the texts that are sent to the trackers."""

    def __init__(self) -> None:
        self.sent: list = []

    def log_texts(self, name, columns, rows, step) -> None:
        self.sent.append((name, columns, rows, step))


@pytest.fixture(scope="module")
def batch(tokenizer):
    """Return six trajectories with advantages."""
    config = make_config(n=2)
    group, envs, _ = make_world(tokenizer, config)
    collector = TrajectoryCollector(config, tokenizer)
    batch = collector.multi_turn_loop(envs.gen_batch(1, 3), group, envs)
    collector.close()
    batch.batch["advantages"] = torch.randn(batch.batch["responses"].shape)
    return batch


@pytest.fixture
def journal(tokenizer, tmp_path: Path):
    """Return an open journal."""
    with RunDirectory(tmp_path / "run").open({}) as run:
        journal = Journal(run, make_config(), tokenizer)
        journal.open(None, 10)
        yield journal


@pytest.mark.parametrize(("keeps_later_steps", "steps"), [(True, [1, 2, 3]), (False, [1, 2])])
def test_records_of_later_steps_stay_if_nothing_is_trained(
    tokenizer, tmp_path, keeps_later_steps, steps
):
    with RunDirectory(tmp_path / "run").open({}) as run:
        for step in (1, 2, 3):
            run.write_rollouts(step, [{"n": step}])
            jsonl.append(tmp_path / "run" / "metrics.jsonl", {"step": step, "x": 1.0})
        journal = Journal(run, make_config(), tokenizer)
        journal.open(2, 10, keeps_later_steps=keeps_later_steps)
        journal.log_step(2, {"val/x": 2.0})
        journal.finish_run()
        assert run.rollout_steps() == steps
        assert [line["step"] for line in read_metrics(tmp_path / "run")] == steps


@pytest.fixture
def may_write(monkeypatch) -> threading.Event:
    """Return an event; no trajectories are written before it is set."""
    may_write = threading.Event()
    write = RunDirectory.write_rollouts

    def write_later(*arguments) -> Path:
        assert may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(RunDirectory, "write_rollouts", write_later)
    return may_write


def test_files_hold_the_reported_values_after_later_changes(
    tokenizer, batch, journal, may_write, tmp_path: Path
):
    jsonl.write(tmp_path / "rows", format_rollout_lines(batch, tokenizer))
    jsonl.write(tmp_path / "tokens", format_token_lines(batch, tokenizer))
    table = batch.select()
    journal.log_rollouts(1, table)
    metrics = {"actor/loss": 1.0}
    journal.log_step(1, metrics)
    table.batch["advantages"] = torch.zeros_like(table.batch["advantages"])
    table.pop(["response_mask"], ["steps"])
    metrics["actor/loss"] = 2.0
    may_write.set()
    journal.finish_run()
    run = journal.run
    assert run.rollout_path(1).read_bytes() == (tmp_path / "rows").read_bytes()
    assert run.token_path(1).read_bytes() == (tmp_path / "tokens").read_bytes()
    (line,) = jsonl.read(run.metrics_path)
    assert line["actor/loss"] == 1.0
    assert run.report_path.exists()


def test_write_error_ends_the_run_at_the_next_report(batch, journal, monkeypatch):
    def raise_disk_full(*_) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(RunDirectory, "write_rollouts", raise_disk_full)
    journal.log_rollouts(1, batch)
    with pytest.raises(OSError, match="no space left"):
        journal.flush()
    with pytest.raises(OSError, match="no space left"):
        journal.log_step(1, {})
    with pytest.raises(OSError, match="no space left"):
        journal.finish_run()
    journal.finish_run()
    assert not journal.run.metrics_path.exists(), "the metrics of a step follow its trajectories"


@pytest.mark.parametrize("error_type", [KeyboardInterrupt, ZeroDivisionError])
def test_failed_write_does_not_replace_the_error_that_ended_the_run(
    batch, journal, monkeypatch, caplog, error_type
):
    def raise_process_gone(*_) -> None:
        raise RuntimeError("the process of the rows has ended")

    monkeypatch.setattr(RunDirectory, "write_rollouts", raise_process_gone)
    with pytest.raises(error_type), contextlib.ExitStack() as stack:
        stack.callback(journal.close)
        journal.log_rollouts(1, batch)
        raise error_type
    assert "the process of the rows has ended" in caplog.text
    assert journal.run.report_path.exists()


def test_checkpoint_appears_after_the_files_of_its_step(batch, journal, may_write, tmp_path):
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
    may_write.set()
    checkpoints.wait(60)
    assert list(checkpoints.find_checkpoints()) == [1]
    assert journal.run.rollout_path(1).exists()
    assert 1 in [record["step"] for record in jsonl.read(journal.run.metrics_path)]
    journal.finish_run()


@pytest.mark.parametrize("history", ["append", "window"])
def test_rollouts_have_a_second_copy_and_trackers_get_samples(tokenizer, history, tmp_path: Path):
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
    texts = FakeTracking()
    journal.tracking = texts
    journal.log_rollouts(4, batch)
    journal.flush()
    assert texts.sent == []
    tokens = list(jsonl.read(tmp_path / "run" / "tokens" / "4.jsonl"))
    assert [line["traj_uid"] for line in tokens] == list(batch.non_tensor_batch["traj_uid"])
    (tmp_path / "run" / "tokens" / "4.jsonl").unlink()
    journal.log_rollouts(4, batch, validation=True)
    journal.flush()
    # The trainer computes no token numbers for validation trajectories.
    assert not list((tmp_path / "run" / "tokens").iterdir())
    for folder, name in (("train", "4.jsonl"), ("val", "val_4.jsonl")):
        first_copy, second_copy = (
            tmp_path / "run" / "rollouts" / name,
            tmp_path / folder / "4.jsonl",
        )
        assert list(jsonl.read(second_copy)) == list(jsonl.read(first_copy)) and len(
            list(jsonl.read(first_copy))
        ) == len(batch)
    ((name, columns, rows, step),) = texts.sent
    assert (name, columns, step) == ("val/trajectories", ["task", "return", "trajectory"], 4)
    assert len(rows) == 2 and all(reward == "1" for _, reward, _ in rows)
    assert rows[0][2].count("> You are at") == rows[0][2].count("<action>") >= 3


def test_report_that_cannot_be_written_does_not_end_the_run(journal, caplog):
    journal.run.report_path.mkdir()  # a file cannot replace a directory
    journal.log_step(1, {"val/success_rate": 0.5})
    journal.finish_run()
    # After the validation and at the end. The message has the error of the child process.
    assert len(list_logged(caplog, Journal.__module__, "report.html")) == 2
    assert [record["step"] for record in jsonl.read(journal.run.metrics_path)] == [1]
