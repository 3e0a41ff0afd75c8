"""Protocols of the arguments of ``RayPPOTrainer``.

Each protocol declares only the members that the trainer uses.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from verl.protocol import DataProto
from verl.records import WrittenFiles

__all__ = [
    "ActorGroup",
    "Checkpoints",
    "Collector",
    "CriticGroup",
    "Pending",
    "ReferenceGroup",
    "RewardFunction",
    "RewardGroup",
    "RolloutGroup",
    "StepJournal",
    "TaskSource",
    "TrainerWorkers",
    "WorkerGroupLike",
]


class TaskSource(Protocol):
    """Tasks of one split as tables without tensors: a batch per step, or the validation set."""

    @property
    def task_list(self) -> Sized: ...
    @property
    def panel_hash(self) -> str: ...
    def gen_batch(self, step: int, batch_size: int) -> DataProto: ...
    def panel_batch(self) -> DataProto: ...


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """Rollout engines without the training workers, which a collector never calls."""

    rollout_workers: Sequence[Any]


# A collector needs a more specific task source than the trainer: it also starts environments.
TasksT_contra = TypeVar("TasksT_contra", contravariant=True)


class Collector(Protocol[TasksT_contra]):
    """Generator of trajectories, which it packs into rows.

    Rows may contain score requests: texts whose log-probs the method needs (columns ``branches``
    and ``spans``). Training workers compute the scores together with the old log-probs.
    """

    def multi_turn_loop(
        self,
        gen_batch: DataProto,
        actor_rollout_wg: RolloutGroup,
        envs: TasksT_contra,
        is_train: bool = True,
    ) -> DataProto: ...

    def greedy_loop(
        self, gen_batch: DataProto, actor_rollout_wg: RolloutGroup, envs: TasksT_contra
    ) -> DataProto: ...

    def read_answers(self, data: DataProto) -> DataProto:
        """Replace score requests and their results by columns that the advantage estimator reads.

        The results are ``branch_scores`` and ``span_scores``.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint, as JSON."""
        ...

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the ``state`` of a checkpoint."""
        ...


class RewardFunction(Protocol):
    """Function that returns the ``token_level_scores`` [B, R], the rewards before a KL penalty."""

    def __call__(self, data: DataProto, /) -> torch.Tensor: ...

    def step_rewards(self, data: DataProto, /) -> np.ndarray:
        """Return for each row [B] the list of the rewards of its turns, for turn advantages."""
        ...


# ---- worker groups: Ray adds the registered methods of their workers when they start -------------


class Pending(Protocol):
    """Future result of a group call."""

    def get(self, timeout_s: float | None = None) -> Any: ...


class WorkerGroupLike(Protocol):
    """Group of training workers of any role."""

    @property
    def world_size(self) -> int: ...
    def submit(self, method: str, *args: object, **kwargs: object) -> Pending: ...
    def shutdown(self, timeout_s: float = 10.0) -> None: ...


@runtime_checkable
class ActorGroup(WorkerGroupLike, Protocol):
    """Group of ``verl.workers.actor.ActorWorker`` that trains the policy."""

    def compute_log_prob(self, data: DataProto, /) -> DataProto: ...
    def update_actor(self, data: DataProto, /) -> DataProto: ...
    def call_for_refs(self, method: str, /, *args: object) -> list[Any]: ...
    def save_checkpoint(self, directory: str, /) -> object: ...
    def written_files(self) -> Sequence[WrittenFiles | None]: ...
    def load_checkpoint(self, directory: str, /) -> object: ...


@runtime_checkable
class ReferenceGroup(WorkerGroupLike, Protocol):
    """Group of ``verl.workers.actor.ActorWorker`` with the frozen reference policy."""

    def compute_ref_log_prob(self, data: DataProto, /) -> DataProto: ...


@runtime_checkable
class CriticGroup(WorkerGroupLike, Protocol):
    """Group of ``verl.workers.critic.CriticWorker`` that trains the value function."""

    def compute_values(self, data: DataProto, /) -> DataProto: ...
    def update_critic(self, data: DataProto, /) -> DataProto: ...
    def save_checkpoint(self, directory: str, /) -> object: ...
    def written_files(self) -> Sequence[WrittenFiles | None]: ...
    def load_checkpoint(self, directory: str, /) -> object: ...


@runtime_checkable
class RewardGroup(WorkerGroupLike, Protocol):
    """Group of ``verl.workers.reward_model.RewardModelWorker`` that scores trajectories."""

    def compute_rm_score(self, data: DataProto, /) -> DataProto: ...


class TrainerWorkers(Protocol):
    """All worker groups and rollout engines of a run (``resources.TrainingWorkers``)."""

    @property
    def rollout_workers(self) -> Sequence[Any]: ...
    @property
    def actor_group(self) -> ActorGroup: ...
    @property
    def critic_group(self) -> CriticGroup | None: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def has_reference(self) -> bool: ...
    def compute_log_prob(self, data: DataProto) -> DataProto: ...
    def compute_ref_log_prob(self, data: DataProto) -> DataProto: ...
    def compute_values(self, data: DataProto) -> DataProto: ...
    def engine_metrics(self) -> dict[str, float]: ...
    def sleep_engines(self) -> None: ...
    def wake_engines(self) -> None: ...
    def sync_weights(self, version: int, updated: bool = False) -> None: ...
    def save_checkpoint(self, directory: Path) -> Callable[[], list[WrittenFiles]]: ...
    def load_checkpoint(self, directory: Path) -> None: ...


# ---- records of a run ----------------------------------------------------------------------------


class StepJournal(Protocol):
    """Record of metrics and rollouts (``verl.record.journal.Journal``)."""

    def open(self, resume_step: int | None, total_steps: int) -> None: ...
    def log_step(self, step: int, metrics: dict[str, float]) -> None: ...
    def log_rollouts(self, step: int, batch: DataProto, validation: bool = False) -> None: ...
    def flush(self) -> None: ...
    def finish_run(self) -> None: ...


class Checkpoints(Protocol):
    """Verified checkpoint directories of one run (``verl.utils.checkpoint.CheckpointManager``)."""

    def save(self, step: int, writer: Callable[[Path], object], state: dict[str, Any]) -> Path: ...
    def load_state(self, path: str | Path) -> Mapping[str, Any]: ...
    def find_latest_valid(self) -> Path | None: ...
    def set_aside_later_checkpoints(self, step: int) -> None: ...
    def wait(self) -> None: ...
