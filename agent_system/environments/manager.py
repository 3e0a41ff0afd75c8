"""Environment manager: selects the tasks of each training step. Each task is repeated as a group.

The trainer calls ``gen_batch`` for batches of tasks and ``panel_batch`` for the validation set. The
collector generates the trajectories in its own environments. ``vectorised`` steps a batch without a
collector.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

import verl
from agent_system.environments.env import Task
from agent_system.environments.env_registry import env_settings, get_package, missing_extra_error
from agent_system.environments.tasks import (
    SEED_MASK,
    GroupMismatch,
    TaskSchedule,
    assert_same_start,
    check_disjoint,
    group_by_part,
    hash_validation_set,
    select_validation_set,
)
from agent_system.environments.vectorised import VectorisedPlay
from verl.utils.seeds import derive_seed
from verl.utils.statistics import bootstrap_interval

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig
    from verl.protocol import DataProto

__all__ = [
    "EnvironmentManagerBase",
    "GroupMismatch",
    "assert_same_start",
    "bootstrap_interval",
    "make_envs",
]


TaskGroup = tuple[Task, int, str]  # task, environment seed, uid


class EnvironmentManagerBase(VectorisedPlay):
    """Tasks of one split, and vectorised environments for them.

    ``config`` is the whole configuration; ``env`` and ``data.shuffle`` are read. The rows of a
    group (uid) have the same task and the same environment seed.
    """

    def __init__(self, config: "PPOConfig", split: str) -> None:
        self.env_config = config.env
        self.shuffle = config.data.shuffle
        self.split = split
        self.settings = env_settings(config.env)
        self.package = get_package(config.env.env_name)
        self._schedule: tuple[list[Task], TaskSchedule] | None = None
        self.group_size = config.env.rollout.n
        try:
            self.task_list = list(self.package.tasks(self.settings, split))
        except ModuleNotFoundError as error:
            raise missing_extra_error(config.env.env_name, error) from error
        weights = self.package.part_weights(self.settings)
        self.panel: list[tuple[Task, int]] = []
        if split == "val":
            self.panel = select_validation_set(self.task_list, config.env.val_tasks, weights)
        if split == "train":
            self.task_list = self.task_list[: config.env.train_tasks]
        if not self.task_list:
            raise ValueError(
                f"environment {config.env.env_name!r} has no {split} tasks; "
                f"its settings: {self.settings!r}"
            )
        self._check_parts(weights)

    def gen_batch(self, step: int, batch_size: int, draw: int = 0) -> "DataProto":
        """Return the tasks of training step ``step``.

        The batch has ``batch_size`` groups of ``env.rollout.n`` consecutive rows. An epoch is a
        permutation of all tasks, or their given order without ``data.shuffle``.

        Args:
            step: Training step, from 1.
            batch_size: Number of groups.
            draw: Number of the batch within the step, from 0, if a step needs several batches. The
                batches have different tasks only if tasks are shuffled.

        Returns:
            Columns ``task`` (dict), ``uid``, ``member`` (int), ``env_seed`` (int), ``data_source``
            and ``task_id``. ``meta_info["global_step"]`` is the step.
        """
        groups: list[TaskGroup] = []
        for group in range(batch_size):
            # The number depends on step and group only, not on earlier batches.
            task = self.task_schedule.task_at((step - 1) * batch_size + group, draw)
            seed = derive_seed(self.env_config.seed, self.split, step, draw, group) & SEED_MASK
            groups.append((task, seed, f"{self.split}-{step}-{draw}-{group}"))
        batch = self._build_batch(groups, self.group_size)
        batch.meta_info["global_step"] = step
        return batch

    def panel_batch(self) -> "DataProto":
        """Return the validation set, one row per task, with the columns of ``gen_batch``. It is the
        same at every call.
        """
        # The seeds depend on the tasks only, so runs with other seeds have the same start states.
        groups = [(task, seed, f"panel-{task['task_id']}") for task, seed in self.panel]
        return self._build_batch(groups, 1)

    @property
    def panel_hash(self) -> str:
        """Hash of the validation set. Success rates are comparable if their hashes are equal.

        Equal hashes mean equal tasks and environment seeds, and thus equal start states.
        """
        return hash_validation_set(self.panel)

    @property
    def task_schedule(self) -> TaskSchedule:
        """Order in which training steps use the tasks. Rebuilt after ``task_list`` was replaced."""
        if self._schedule is None or self._schedule[0] is not self.task_list:
            weights = self.package.part_weights(self.settings)
            seed = (self.env_config.seed, self.split)
            self._schedule = (
                self.task_list,
                TaskSchedule(self.task_list, weights, self.shuffle, seed),
            )
        return self._schedule[1]

    def _check_parts(self, weights: Mapping[str, int]) -> None:
        bad_parts = [
            part for part, tasks in group_by_part(self.task_list, weights).items() if not tasks
        ]
        if bad_parts:
            raise ValueError(
                f"environment {self.env_config.env_name!r} has no {self.split} tasks of "
                f"{', '.join(map(repr, bad_parts))}; fix: raise env.train_tasks, or remove the part"
            )

    def replace_tasks(self, tasks: list[Task]) -> None:
        """Replace the tasks of this split. The validation set is drawn from them again."""
        self.task_list = tasks
        if self.split == "val":
            self.panel = select_validation_set(
                tasks, self.env_config.val_tasks, self.package.part_weights(self.settings)
            )

    def _build_batch(self, groups: list[TaskGroup], members: int) -> "DataProto":
        rows = [
            (task, seed, uid, member) for task, seed, uid in groups for member in range(members)
        ]
        columns = {
            "task": [row[0] for row in rows],
            "env_seed": np.array([row[1] for row in rows], dtype=np.int64),
            "uid": [row[2] for row in rows],
            "member": np.array([row[3] for row in rows], dtype=np.int64),
            "data_source": [row[0]["data_source"] for row in rows],
            "task_id": [row[0]["task_id"] for row in rows],
        }
        return verl.DataProto.from_dict(non_tensors=columns)


def make_envs(config: "PPOConfig") -> tuple[EnvironmentManagerBase, EnvironmentManagerBase]:
    """Return the training and the validation manager of ``config.env``.

    Raises ``ValueError`` if their tasks overlap.
    """
    train = EnvironmentManagerBase(config, "train")
    val = EnvironmentManagerBase(config, "val")
    check_disjoint(train.task_list, val.task_list)
    return train, val
