"""Tests that a save holds the state at its request, and that a failed write names its rank."""

import shutil
import threading
from pathlib import Path

import pytest
import torch

from tests.helpers.policy_rows import policy_config, random_rows, wait_for_files
from tests.helpers.tiny_model import make_tiny_policy
from verl.utils.checkpoint import CheckpointError, CheckpointManager, verify_checkpoint
from verl.workers.actor import ActorWorker
from verl.workers.engine_state import ShardWriter, gather_full_weights, load_engine, read_weights


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


def actor_of(policy, contents=("model", "optimizer", "extra")) -> ActorWorker:
    config = policy_config(policy)
    config.actor.checkpoint.contents = list(contents)
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    return worker


def delay_writes(monkeypatch, until: threading.Event, error: Exception | None = None) -> None:
    """Let writes wait for ``until``, and then fail if there is an ``error``."""
    write = ShardWriter.write_data

    def wait_and_write(self, plan, planner):
        assert until.wait(60)
        if error is not None:
            raise error
        return write(self, plan, planner)

    monkeypatch.setattr(ShardWriter, "write_data", wait_and_write)


def test_training_during_a_save_does_not_change_it(policy, tmp_path, monkeypatch):
    worker = actor_of(policy)
    data = random_rows()
    worker.update_actor(data)
    before = gather_full_weights(worker.train_engine)
    may_write = threading.Event()
    delay_writes(monkeypatch, may_write)
    worker.save_checkpoint(str(tmp_path))
    assert worker.written_files() is None
    worker.update_actor(data)
    after = gather_full_weights(worker.train_engine)
    may_write.set()
    written = wait_for_files(worker)
    assert sorted(written.sizes) == sorted(str(path) for path in tmp_path.iterdir())
    assert all(torch.equal(tensor, before[name]) for name, tensor in read_weights(tmp_path).items())
    resumed = actor_of(policy)
    resumed.load_checkpoint(str(tmp_path))
    resumed.update_actor(data)
    for name, tensor in gather_full_weights(resumed.train_engine).items():
        assert torch.equal(tensor, after[name]), "the moments differ from those of the save"


def test_failed_write_names_the_rank_and_the_directory(policy, tmp_path, monkeypatch):
    worker = actor_of(policy)
    may_write = threading.Event()
    delay_writes(monkeypatch, may_write, OSError(28, "No space left on device"))
    worker.save_checkpoint(str(tmp_path))
    may_write.set()
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        wait_for_files(worker)
    message = str(raised.value)
    assert message.startswith("ActorWorker rank 0 on ") and str(tmp_path) in message


def test_exported_model_may_have_folders(policy, tmp_path):
    source = Path(shutil.copytree(policy, tmp_path / "policy"))
    template = Path("additional_chat_templates") / "tools.jinja"
    (source / template).parent.mkdir()
    (source / template).write_text("{{ messages }}")
    worker = actor_of(source, ("model", "hf_model"))

    def write(directory):
        worker.save_checkpoint(str(directory / "actor"))
        return [wait_for_files(worker)]

    checkpoint = CheckpointManager(tmp_path / "checkpoints").save(1, write, {})
    (names,) = verify_checkpoint(checkpoint)["writers"].values()
    assert {f"actor/hf_model/{template}", "actor/hf_model/model.safetensors"} <= set(names)


def test_checkpoint_holds_the_listed_contents(policy, tmp_path):
    worker = actor_of(policy, ("model", "hf_model"))
    worker.update_actor(random_rows())
    worker.save_checkpoint(str(tmp_path))
    written = wait_for_files(worker)
    assert str(tmp_path / "hf_model" / "model.safetensors") in written.sizes
    assert not list(tmp_path.glob("rng_rank*"))
    engine = actor_of(policy).train_engine
    load_engine(engine, tmp_path)
    assert engine.steps == 1 and engine.optimizer is not None
    assert not engine.optimizer.state, "moments are not in the contents"
