"""The configuration of a run does not change once it is prepared."""

import pickle
from dataclasses import FrozenInstanceError

import pytest

from verl.config.load import load_config, to_dict
from verl.config.schema import PPOConfig
from verl.config.settings import value_at_path
from verl.trainer import cli

WORDS = ["env.env_name=number_line", "actor_rollout_ref.model.path=/policy"]
KEYS = [
    "trainer.device",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.optim.total_training_steps",
    "env.number_line",
    "env.levels",
    "algorithm.rlvcr.enable",
]


def assign(cfg: PPOConfig, path: str, value: object) -> None:
    above, _, name = path.rpartition(".")
    setattr(value_at_path(cfg, above), name, value)


@pytest.mark.parametrize("path", KEYS)
def test_a_key_of_a_frozen_config_cannot_be_assigned(path):
    cfg = load_config("ppo_trainer", WORDS)
    frozen = cfg.as_frozen()
    with pytest.raises(FrozenInstanceError):
        assign(frozen, path, value_at_path(frozen, path))
    assign(cfg, path, value_at_path(cfg, path))  # the copy is frozen, not the config


def test_values_are_written_into_a_copy_that_is_frozen_too():
    cfg = load_config("ppo_trainer", WORDS).as_frozen()
    assert cfg.as_frozen() is cfg and cfg == load_config("ppo_trainer", WORDS)
    changed = cfg.with_values({"trainer.device": "cuda", "env.kwargs": {"size": 4}})
    assert (changed.trainer.device, changed.env.kwargs) == ("cuda", {"size": 4})
    assert (cfg.trainer.device, cfg.env.kwargs) == ("auto", {})
    with pytest.raises(FrozenInstanceError):
        changed.trainer.device = "cpu"


def test_a_frozen_config_is_sent_to_workers_as_it_is():
    cfg = load_config("ppo_trainer", WORDS).as_frozen()
    sent = pickle.loads(pickle.dumps(cfg))
    assert to_dict(sent) == to_dict(cfg)
    with pytest.raises(FrozenInstanceError):
        sent.actor_rollout_ref.actor.optim.lr = 1.0


def test_the_command_line_starts_runs_with_a_frozen_config(tmp_path):
    started: list[PPOConfig] = []
    path = f"actor_rollout_ref.model.path={tmp_path}/policy"
    words = [WORDS[0], path, "cold_start.enable=true"]
    assert cli.run(started.append, "ppo_trainer", argv=words) == 0
    with pytest.raises(FrozenInstanceError):
        started[0].trainer.device = "cpu"
