"""Reward managers by name, or by the place of one's own.

A manager is made with the penalty of an invalid action, the user's function of whole plays (None
where there is none) and ``reward_model.reward_kwargs``::

    @register("mine")
    class Mine(EpisodeRewardManager): ...

in a module that ``actor_rollout_ref.model.external_lib`` imports; or, without registering,
``reward_model.reward_manager=my_lab.rewards:Mine`` (or ``mine.py:Mine``).
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import torch

from agent_system.reward_manager.custom import load_place
from verl.config.settings.hints import did_you_mean
from verl.protocol import DataProto

KEY = "reward_model.reward_manager"


class RewardManager(Protocol):
    """Places what plays earned on the tokens of their rows."""

    def __call__(self, data: DataProto) -> torch.Tensor:
        """``token_level_scores`` [B, R], of which every row sums to its trajectory's outcome."""
        ...

    def step_rewards(self, data: DataProto) -> np.ndarray:
        """Of every row [B] a list: the rewards of its steps."""
        ...


Maker = Callable[..., RewardManager]
M = TypeVar("M", bound=Maker)
REWARD_MANAGERS: dict[str, Maker] = {}


def register(*names: str) -> Callable[[M], M]:
    """Register a class under ``names``; later registrations replace earlier ones."""

    def decorate(cls: M) -> M:
        REWARD_MANAGERS.update(dict.fromkeys(names, cls))
        return cls

    return decorate


def reward_manager_class(name: str) -> Maker:
    """What makes the manager called ``name``, or found there.

    Raises ``ValueError`` for an unknown name, and for a place what its import raises.
    """
    if name in REWARD_MANAGERS:
        return REWARD_MANAGERS[name]
    if ":" not in name:
        raise ValueError(
            f"{KEY}={name!r}: unknown{did_you_mean(name, REWARD_MANAGERS)}; allowed: "
            f"{', '.join(sorted(REWARD_MANAGERS))}, module:Class or FILE.py:Class; "
            "fix: name one of them"
        )
    return load_place(name, KEY)
