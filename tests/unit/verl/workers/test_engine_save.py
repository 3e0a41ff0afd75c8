"""A save holds the state of the moment it was asked for, however late it is written, and a write
that fails says whose it was.
"""

import threading

import pytest
import torch

from tests.helpers.policy_rows import policy_config, random_rows, wait_for_files
from tests.helpers.tiny_model import make_tiny_policy
from verl.utils.checkpoint import CheckpointError
from verl.workers.actor import ActorWorker
from verl.workers.engine_state import full_weights, load_engine, read_weights
from verl.workers.shards import ShardWriter


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


def actor_of(policy, contents=("model", "optimizer", "extra")) -> ActorWorker:
    config = policy_config(policy)
    config.actor.checkpoint.contents = list(contents)
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    return worker


def held_back(monkeypatch, until: threading.Event, error: Exception | None = None) -> None:
    """Writes wait for ``until``, and then fail where there is an ``error``."""
    write = ShardWriter.write_data

    def waiting(self, plan, planner):
        assert until.wait(60)
        if error is not None:
            raise error
        return write(self, plan, planner)

    monkeypatch.setattr(ShardWriter, "write_data", waiting)


def test_what_is_trained_while_a_save_is_written_is_not_in_it(policy, tmp_path, monkeypatch):
    worker = actor_of(policy)
    data = random_rows()
    worker.update_actor(data)
    before = full_weights(worker.train_engine)
    may_write = threading.Event()
    held_back(monkeypatch, may_write)
    worker.save_checkpoint(str(tmp_path))
    assert worker.written_files() is None
    worker.update_actor(data)
    after = full_weights(worker.train_engine)
    may_write.set()
    written = wait_for_files(worker)
    assert sorted(written.sizes) == sorted(str(path) for path in tmp_path.iterdir())
    assert all(torch.equal(tensor, before[name]) for name, tensor in read_weights(tmp_path).items())
    again = actor_of(policy)
    again.load_checkpoint(str(tmp_path))
    again.update_actor(data)
    for name, tensor in full_weights(again.train_engine).items():
        assert torch.equal(tensor, after[name]), "moments are those of the save as well"


def test_a_write_that_fails_names_the_rank_and_the_directory(policy, tmp_path, monkeypatch):
    worker = actor_of(policy)
    may_write = threading.Event()
    held_back(monkeypatch, may_write, OSError(28, "No space left on device"))
    worker.save_checkpoint(str(tmp_path))
    may_write.set()
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        wait_for_files(worker)
    said = str(raised.value)
    assert said.startswith("ActorWorker rank 0 on ") and str(tmp_path) in said


def test_a_checkpoint_holds_what_is_listed(policy, tmp_path):
    worker = actor_of(policy, ("model", "hf_model"))
    worker.update_actor(random_rows())
    worker.save_checkpoint(str(tmp_path))
    written = wait_for_files(worker)
    assert str(tmp_path / "hf_model" / "model.safetensors") in written.sizes
    assert not list(tmp_path.glob("rng_rank*"))
    engine = actor_of(policy).train_engine
    load_engine(engine, tmp_path)
    assert engine.steps == 1 and engine.optimizer is not None
    assert not engine.optimizer.state, "moments were not asked for"
