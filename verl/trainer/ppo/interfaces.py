"""What the trainer asks of those it is handed; whoever offers this can stand in for them.

The trainer gets tasks from a task source, rows from a collector, scores from a reward function and
everything learned from the workers. Each protocol names no more than ``RayPPOTrainer`` calls.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
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
    "WorkerGroupLike",
    "Workers",
]


class TaskSource(Protocol):
    """Tasks of one split as tables without tensors: a batch for every step, or the frozen panel."""

    @property
    def tasks(self) -> Sized: ...
    @property
    def panel_hash(self) -> str: ...
    def gen_batch(self, step: int, batch_size: int) -> DataProto: ...
    def panel_batch(self) -> DataProto: ...


class RolloutGroup(Protocol):
    """What plays need: engines that sample, and the policy to score rows with."""

    @property
    def rollout_workers(self) -> Sequence[Any]: ...
    def compute_log_prob(self, data: DataProto) -> DataProto: ...


# A collector plays the tasks of sources it knows more of: it also starts their environments.
TasksT_contra = TypeVar("TasksT_contra", contravariant=True)


class Collector(Protocol[TasksT_contra]):
    """Plays tasks and returns what was sampled as rows (``docs``: the row, in ``rollout_loop``)."""

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

    def state(self) -> dict[str, Any]:
        """What it keeps over steps, for a checkpoint: JSON."""
        ...

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` said."""
        ...


class RewardFunction(Protocol):
    """Rows -> ``token_level_scores`` [B, R]."""

    def __call__(self, data: DataProto, /) -> torch.Tensor: ...

    def step_rewards(self, data: DataProto, /) -> np.ndarray:
        """[B] lists: the reward of every step of a row, for credit per step."""
        ...


# ---- worker groups: the registered methods of their workers, which groups gain when they start ---


class Pending(Protocol):
    """The answer of a group call that was started."""

    def get(self, timeout_s: float | None = None) -> Any: ...


class WorkerGroupLike(Protocol):
    """What every group of training workers offers."""

    @property
    def world_size(self) -> int: ...
    def submit(self, method: str, *args: object, **kwargs: object) -> Pending: ...
    def shutdown(self, timeout_s: float = 10.0) -> None: ...


@runtime_checkable
class ActorGroup(WorkerGroupLike, Protocol):
    """A group of ``verl.workers.actor.ActorWorker`` that trains the policy."""

    def compute_log_prob(self, data: DataProto, /) -> DataProto: ...
    def update_actor(self, data: DataProto, /) -> DataProto: ...
    def call_refs(self, method: str, /, *args: object) -> list[Any]: ...
    def save_checkpoint(self, directory: str, /) -> object: ...
    def written_files(self) -> Sequence[WrittenFiles | None]: ...
    def load_checkpoint(self, directory: str, /) -> object: ...


@runtime_checkable
class ReferenceGroup(WorkerGroupLike, Protocol):
    """A group of ``verl.workers.actor.ActorWorker`` that holds the frozen reference."""

    def compute_ref_log_prob(self, data: DataProto, /) -> DataProto: ...


@runtime_checkable
class CriticGroup(WorkerGroupLike, Protocol):
    """A group of ``verl.workers.critic.CriticWorker``."""

    def compute_values(self, data: DataProto, /) -> DataProto: ...
    def update_critic(self, data: DataProto, /) -> DataProto: ...
    def save_checkpoint(self, directory: str, /) -> object: ...
    def written_files(self) -> Sequence[WrittenFiles | None]: ...
    def load_checkpoint(self, directory: str, /) -> object: ...


@runtime_checkable
class RewardGroup(WorkerGroupLike, Protocol):
    """A group of ``verl.workers.reward_model.RewardModelWorker``."""

    def compute_rm_score(self, data: DataProto, /) -> DataProto: ...


class Workers(RolloutGroup, Protocol):
    """All groups and engines of a run (``resources.TrainingWorkers``)."""

    @property
    def actor(self) -> ActorGroup: ...
    @property
    def critic(self) -> CriticGroup | None: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def has_reference(self) -> bool: ...
    def compute_ref_log_prob(self, data: DataProto) -> DataProto: ...
    def compute_values(self, data: DataProto) -> DataProto: ...
    def engine_metrics(self) -> dict[str, float]: ...
    def sleep_engines(self) -> None: ...
    def sync_weights(self, version: int, moved: bool = False) -> None: ...
    def save_checkpoint(self, directory: Path) -> Callable[[], list[WrittenFiles]]: ...
    def load_checkpoint(self, directory: Path) -> None: ...


# ---- what a run leaves ---------------------------------------------------------------------------


class StepJournal(Protocol):
    """Where the trainer reports (``verl.record.journal.Journal``)."""

    def open(self, resume_step: int | None, total_steps: int) -> None: ...
    def log_step(self, step: int, metrics: dict[str, float]) -> None: ...
    def log_rollouts(self, step: int, batch: DataProto, validation: bool = False) -> None: ...
    def flush(self) -> None: ...
    def finish(self) -> None: ...


class Checkpoints(Protocol):
    """Verified checkpoint directories of one run (``verl.utils.checkpoint.CheckpointManager``)."""

    def save(self, step: int, writer: Callable[[Path], object], state: dict[str, Any]) -> Path: ...
    def load_state(self, path: str | Path) -> Mapping[str, Any]: ...
    def latest_valid(self) -> Path | None: ...
    def put_aside_after(self, step: int) -> None: ...
    def wait(self) -> None: ...
