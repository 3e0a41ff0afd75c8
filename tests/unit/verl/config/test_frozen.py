"""The configuration of a run does not change after it is prepared."""

import pickle
from dataclasses import FrozenInstanceError

import pytest

from verl.config.load import load_config, to_dict
from verl.config.schema import PPOConfig
from verl.config.settings import value_at_path
from verl.trainer import cli

OVERRIDES = ["env.env_name=number_line", "actor_rollout_ref.model.path=/policy"]
KEYS = [
    "trainer.device",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.optim.total_training_steps",
    "env.number_line",
    "env.levels",
    "algorithm.rlvcr.enable",
]


def assign(cfg: PPOConfig, path: str, value: object) -> None:
    parent, _, name = path.rpartition(".")
    setattr(value_at_path(cfg, parent), name, value)


@pytest.mark.parametrize("path", KEYS)
def test_key_of_a_frozen_config_cannot_be_assigned(path):
    cfg = load_config("ppo_trainer", OVERRIDES)
    frozen = cfg.as_frozen()
    with pytest.raises(FrozenInstanceError):
        assign(frozen, path, value_at_path(frozen, path))
    assign(cfg, path, value_at_path(cfg, path))  # the copy is frozen and the config is not


def test_with_values_returns_a_frozen_copy():
    cfg = load_config("ppo_trainer", OVERRIDES).as_frozen()
    assert cfg.as_frozen() is cfg and cfg == load_config("ppo_trainer", OVERRIDES)
    changed = cfg.with_values({"trainer.device": "cuda", "env.kwargs": {"size": 4}})
    assert (changed.trainer.device, changed.env.kwargs) == ("cuda", {"size": 4})
    assert (cfg.trainer.device, cfg.env.kwargs) == ("auto", {})
    with pytest.raises(FrozenInstanceError):
        changed.trainer.device = "cpu"


def test_frozen_config_is_pickled_unchanged():
    cfg = load_config("ppo_trainer", OVERRIDES).as_frozen()
    sent = pickle.loads(pickle.dumps(cfg))
    assert to_dict(sent) == to_dict(cfg)
    with pytest.raises(FrozenInstanceError):
        sent.actor_rollout_ref.actor.optim.lr = 1.0


def test_command_line_starts_runs_with_a_frozen_config(tmp_path):
    started: list[PPOConfig] = []
    path = f"actor_rollout_ref.model.path={tmp_path}/policy"
    overrides = [OVERRIDES[0], path, "cold_start.enable=true"]
    assert cli.run(started.append, "ppo_trainer", argv=overrides) == 0
    with pytest.raises(FrozenInstanceError):
        started[0].trainer.device = "cpu"
