"""Protocols of the arguments of ``RayPPOTrainer`` that ``agent_system`` implements.

Each protocol declares only the members that the trainer uses.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from verl.protocol import DataProto


class TaskSource(Protocol):
    """Source of the tasks of one split: a batch for each step, or the whole validation set.

    The tasks are returned as a ``DataProto`` without tensors. The validation set is
    ``panel_batch``, and ``panel_hash`` identifies its tasks.
    """

    @property
    def task_list(self) -> Sized: ...
    @property
    def panel_hash(self) -> str: ...
    def gen_batch(self, step: int, batch_size: int) -> DataProto: ...
    def panel_batch(self) -> DataProto: ...


@dataclass(frozen=True, slots=True)
class RolloutWorkerHandles:
    """Handles of the rollout workers, the only workers of a run that its collector may call."""

    rollout_workers: Sequence[Any]


# The type of task source that a collector needs. It is more specific than ``TaskSource``, because
# the collector also starts environments.
TasksT_contra = TypeVar("TasksT_contra", contravariant=True)


class Collector(Protocol[TasksT_contra]):
    """Generator of trajectories, which it packs into rows.

    Rows may contain score requests (columns ``branches`` and ``spans``): texts whose log-probs
    training workers compute together with the old log-probs.
    """

    def multi_turn_loop(
        self,
        gen_batch: DataProto,
        actor_rollout_wg: RolloutWorkerHandles,
        envs: TasksT_contra,
        is_train: bool = True,
    ) -> DataProto: ...

    def greedy_loop(
        self, gen_batch: DataProto, actor_rollout_wg: RolloutWorkerHandles, envs: TasksT_contra
    ) -> DataProto: ...

    def convert_scores_to_estimator_inputs(self, data: DataProto) -> DataProto:
        """Replace score requests and their results by columns that the advantage estimator reads.

        ``data`` has the results in the columns ``branch_scores`` and ``span_scores``.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint, such as unfinished groups, as JSON."""
        ...

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the ``state`` that ``state()`` returned when a checkpoint was saved."""
        ...


class RewardFunction(Protocol):
    """Function that returns the ``token_level_scores`` [B, R], the rewards before a KL penalty."""

    def __call__(self, data: DataProto, /) -> torch.Tensor: ...

    def step_rewards(self, data: DataProto, /) -> np.ndarray:
        """Return for each row [B] the list of the rewards of its turns."""
        ...
