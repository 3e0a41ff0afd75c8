"""The environment manager: which tasks are played, in groups, and a vectorised way to play them.

The trainer asks it for batches of tasks (``gen_batch``) and for the validation panel
(``panel_batch``); trajectories are played by the collector's own environments.
``reset``/``step``/``success_evaluator`` play a batch in lock-step over a private pool, for users
and scripts that want environments without a collector.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import verl
from agent_system.environments.base import Observation
from agent_system.environments.env_registry import env_settings, get_package, missing_extra
from agent_system.environments.lockstep import LockStep
from agent_system.environments.tasks import (
    SEED_BITS,
    check_disjoint,
    epoch_order,
    panel_digest,
    panel_of,
)
from verl.utils.seeds import derive_seed
from verl.utils.statistics import bootstrap_interval

if TYPE_CHECKING:
    from verl.protocol import DataProto

__all__ = [
    "EnvironmentManagerBase",
    "GroupMismatch",
    "assert_same_start",
    "bootstrap_interval",
    "make_envs",
]


class GroupMismatch(RuntimeError):
    """Two members of a group did not start from the same state: their returns cannot be compared."""


def assert_same_start(uids: Sequence[str], starts: Sequence[tuple[str, str] | None]) -> None:
    """Raise ``GroupMismatch`` unless rows with the same uid had the same start: text and state of
    the observation.

    ``None`` stands for a member whose reset failed; it is not compared.
    """
    first: dict[str, tuple[str, str]] = {}
    for uid, start in zip(uids, starts, strict=True):
        if start is not None and first.setdefault(uid, start) != start:
            other = first[uid]
            raise GroupMismatch(
                f"members of group {uid} started from different states: {other[0][:200]!r} and {start[0][:200]!r}; the "
                "environment's reset must depend on task and seed alone"
            )


class EnvironmentManagerBase:
    """Tasks of one split and environments to play them.

    ``config`` is the whole configuration, of which ``env`` and ``data.shuffle`` are read. Rows that
    belong to one group (uid) have the same task and the same environment seed.
    """

    def __init__(self, config: Any, split: str) -> None:
        self.env_config = config.env
        self.shuffle = config.data.shuffle
        self.split = split
        self.settings = env_settings(config.env)
        self.package = get_package(config.env.env_name)
        self.group_size = config.env.rollout.n
        try:
            self.tasks = list(self.package.tasks(self.settings, split))
        except ModuleNotFoundError as error:
            raise missing_extra(config.env.env_name, error) from error
        self.panel = panel_of(self.tasks, config.env.val_tasks) if split == "val" else []
        if split == "train":
            self.tasks = self.tasks[: config.env.train_tasks]
        if not self.tasks:
            raise ValueError(
                f"environment {config.env.env_name!r} has no {split} tasks; its settings: {self.settings!r}"
            )
        self._order: tuple[tuple, list[int]] = ((), [])
        self._play: LockStep | None = None

    # ---- what is played --------------------------------------------------------------------------------------------

    def gen_batch(self, step: int, batch_size: int, draw: int = 0) -> "DataProto":
        """Tasks of training step ``step``: ``batch_size`` groups of ``env.rollout.n`` rows, members
        next to each other.

        Steps count from 1. An epoch is a permutation of all tasks, or their own order without
        ``data.shuffle``. ``draw`` > 0 gives further batches for the same step, which differ where
        tasks are shuffled. Columns: ``task`` (dict), ``uid``, ``member`` (int), ``env_seed`` (int),
        ``data_source``, ``task_id``; the step is ``meta_info["global_step"]``.
        """
        groups = []
        for group in range(batch_size):
            epoch, place = divmod((step - 1) * batch_size + group, len(self.tasks))
            task = self.tasks[self._epoch(draw, epoch)[place]]
            seed = derive_seed(self.env_config.seed, self.split, step, draw, group) & SEED_BITS
            groups.append((task, seed, f"{self.split}-{step}-{draw}-{group}"))
        batch = self._rows(groups, self.group_size)
        batch.meta_info["global_step"] = step
        return batch

    def panel_batch(self) -> "DataProto":
        """The frozen panel, one row per task; the columns of ``gen_batch``."""
        groups = [(task, seed, f"panel-{task['task_id']}") for task, seed in self.panel]
        return self._rows(groups, 1)

    @property
    def panel_hash(self) -> str:
        """What a reported success rate must be quoted with: equal hashes mean equal tasks and start
        states.
        """
        return panel_digest(self.panel)

    def _epoch(self, draw: int, epoch: int) -> list[int]:
        key = (self.env_config.seed, self.split, "order", draw, epoch)
        if self._order[0] != key:
            count = len(self.tasks)
            self._order = (key, epoch_order(count, *key) if self.shuffle else list(range(count)))
        return self._order[1]

    def _rows(self, groups: list[tuple[dict, int, str]], members: int) -> "DataProto":
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

    # ---- playing in lock-step --------------------------------------------------------------------------------------

    def reset(self, gen_batch: "DataProto") -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
        """Start one episode per row; return observations (``text``, ``image``, ``anchor``: lists
        [B]) and infos [B].

        Raises ``GroupMismatch`` when members of a uid start from different states, ``EnvFailure``
        from the environment.
        """
        rows = gen_batch.non_tensor_batch
        if self._play is None:
            self._play = LockStep(self.env_config, self.settings)
        observations = self._play.reset(rows["task"], rows["env_seed"])
        assert_same_start(
            rows["uid"], [(observation.text, observation.state) for observation in observations]
        )
        return _columns(observations), [observation.info for observation in observations]

    def step(
        self, text_actions: Sequence[str]
    ) -> tuple[dict[str, list[Any]], np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Project and play one model text per row; rows that are done stay where they are with
        reward 0.

        Returns observations, rewards [B] float32, dones [B] bool, infos [B] (``won``,
        ``is_action_valid``).
        """
        if self._play is None:
            raise RuntimeError("step before reset")
        projected = [self.package.project(text) for text in text_actions]
        results = self._play.step([action for action, _ in projected])
        infos = []
        for (_, formed), (_, _, _, info) in zip(projected, results, strict=True):
            infos.append(
                {**info, "is_action_valid": bool(formed and info.get("is_action_valid", True))}
            )
        rewards = np.array([result[1] for result in results], dtype=np.float32)
        dones = np.array([result[2] for result in results], dtype=bool)
        return _columns([result[0] for result in results]), rewards, dones, infos

    def success_evaluator(
        self, infos: Sequence[dict[str, Any]], data_sources: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """``success_rate`` [B] (0 or 1 per episode) over all rows, and
        ``<data_source>_success_rate`` for each source.

        ``infos`` are those of the last step of each episode.
        """
        outcome: dict[str, list[float]] = defaultdict(list)
        for info, source in zip(infos, data_sources, strict=True):
            won = float(bool(info.get("won", False)))
            outcome["success_rate"].append(won)
            outcome[f"{source}_success_rate"].append(won)
        return {key: np.array(values, dtype=np.float32) for key, values in outcome.items()}

    def close(self) -> None:
        """End the private pool, if there is one."""
        play, self._play = self._play, None
        if play is not None:
            play.close()


def _columns(observations: Sequence[Observation]) -> dict[str, list[Any]]:
    return {
        "text": [o.text for o in observations],
        "image": [o.image for o in observations],
        "anchor": [o.state for o in observations],
    }


def make_envs(config: Any) -> tuple[EnvironmentManagerBase, EnvironmentManagerBase]:
    """The train and the validation manager of ``config.env``; raises ``ValueError`` when their
    tasks overlap.
    """
    train, val = EnvironmentManagerBase(config, "train"), EnvironmentManagerBase(config, "val")
    check_disjoint(train.tasks, val.tasks)
    return train, val
