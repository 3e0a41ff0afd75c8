"""Registry of reward managers, by name or import path.

A manager gets the penalty of an invalid action, the user-provided score function (or None), and
``reward_model.reward_kwargs``. Register a class in a module that
``actor_rollout_ref.model.external_lib`` imports::

    @register("mine")
    class Mine(EpisodeRewardManager): ...

Without registration, use ``reward_model.reward_manager=my_lab.rewards:Mine`` or ``mine.py:Mine``.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import torch

from agent_system.reward_manager.custom import load_import_path
from verl.config.settings.hints import did_you_mean
from verl.protocol import DataProto

REWARD_MANAGER_KEY = "reward_model.reward_manager"


class RewardManager(Protocol):
    """Protocol of a reward manager, which assigns outcomes of trajectories to tokens."""

    def __call__(self, data: DataProto) -> torch.Tensor:
        """Return ``token_level_scores`` [B, R]. Each row sums to its trajectory's outcome."""
        ...

    def step_rewards(self, data: DataProto) -> np.ndarray:
        """Return a list for every row [B]: the rewards of its turns."""
        ...


RewardManagerFactory = Callable[..., RewardManager]
M = TypeVar("M", bound=RewardManagerFactory)
REWARD_MANAGERS: dict[str, RewardManagerFactory] = {}


def register(*names: str) -> Callable[[M], M]:
    """Register a class under ``names``. A later registration replaces an earlier one."""

    def register_class(cls: M) -> M:
        REWARD_MANAGERS.update(dict.fromkeys(names, cls))
        return cls

    return register_class


def reward_manager_class(name: str) -> RewardManagerFactory:
    """Return the class registered as ``name``, or at the import path ``name``.

    Raises ``ValueError`` for an unknown name, and what ``load_import_path`` raises.
    """
    if name in REWARD_MANAGERS:
        return REWARD_MANAGERS[name]
    if ":" not in name:
        raise ValueError(
            f"{REWARD_MANAGER_KEY}={name!r}: unknown{did_you_mean(name, REWARD_MANAGERS)}; "
            f"allowed: {', '.join(sorted(REWARD_MANAGERS))}, module:Class or FILE.py:Class; "
            "fix: name one of them"
        )
    return load_import_path(name, REWARD_MANAGER_KEY)
