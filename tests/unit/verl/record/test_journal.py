"""The journal: where trajectories go, and which plays the trackers see."""

from pathlib import Path

import pytest

from agent_system.multi_turn_rollout import TrajectoryCollector
from tests.helpers.play import make_config, make_world
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.record.journal import Journal
from verl.record.run_dir import RunDirectory
from verl.record.tracking import Tracking
from verl.utils import jsonl


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


class Texts(Tracking):
    """Stands for the trackers; keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list = []

    def log_texts(self, name, columns, rows, step) -> None:
        self.sent.append((name, columns, rows, step))


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
    assert texts.sent == []
    tokens = list(jsonl.read(tmp_path / "run" / "tokens" / "4.jsonl"))
    assert [line["traj_uid"] for line in tokens] == list(batch.non_tensor_batch["traj_uid"])
    (tmp_path / "run" / "tokens" / "4.jsonl").unlink()
    journal.log_rollouts(4, batch, validation=True)
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
