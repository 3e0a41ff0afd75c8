"""Partial rollouts: groups that are not finished continue while finished ones are trained on.

    call 1   start a b c d e       a b c are done  ──▶ returned     d e continue
    call 2   start f g h           d f g are done  ──▶ returned     e h continue

No group is dropped, so slow tasks are as frequent in the training data as fast ones. Their
trajectories are returned later.
"""

import asyncio
import logging
import re
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.multi_turn_rollout.trajectory import Trajectory
from verl.protocol import DataProto
from verl.utils.saved_state import check_state_value

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Number of the first batch of additional groups within a step (argument ``batch_in_step`` of
# ``gen_batch``). Lower numbers are for batches that replace a failed batch.
FIRST_EXTRA_BATCH = 4
# Name of a group: split, step, number of the batch in the step, number of the group, and number of
# groups in its batch.
_GROUP_NAME = re.compile(r"[a-z]+(-[0-9]{1,9}){3}@[0-9]{1,9}")


class GroupsInFlight(Generic[T]):
    """Running coroutines by name, in order of start.

    A coroutine that was unfinished in ``max_calls_waited`` calls of ``take_finished`` must be among
    the results of the next call, which waits for it.
    """

    def __init__(self, max_calls_waited: int) -> None:
        self._max_calls_waited = max_calls_waited
        self._tasks: dict[str, asyncio.Task[T]] = {}
        self._num_calls_waited: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, coroutine: Coroutine[Any, Any, T]) -> None:
        """Start ``coroutine``. Raises ``ValueError`` for a name that is already running."""
        if name in self._tasks:
            coroutine.close()
            raise ValueError(f"group {name!r} is already in flight; names must be unique")
        self._tasks[name] = asyncio.ensure_future(coroutine)
        self._num_calls_waited[name] = 0

    async def take_finished(self, max_unfinished_groups: int) -> list[T]:
        """Return results, oldest first, when all but ``max_unfinished_groups`` coroutines are done.

        If a coroutine raises, cancel the others and raise its error.
        """
        num_returned = max(len(self._tasks) - max_unfinished_groups, 0)
        try:
            while not self._are_enough_done(num_returned):
                running_tasks = [task for task in self._tasks.values() if not task.done()]
                await asyncio.wait(running_tasks, return_when=asyncio.FIRST_COMPLETED)
                self._raise_first_error()
            self._raise_first_error()
        except BaseException:
            await self.cancel_all()
            raise
        done_names = [name for name, task in self._tasks.items() if task.done()][:num_returned]
        results = [self._tasks.pop(name).result() for name in done_names]
        for name in done_names:
            del self._num_calls_waited[name]
        for name in self._num_calls_waited:
            self._num_calls_waited[name] += 1
        return results

    async def cancel_all(self) -> None:
        """Cancel all running coroutines and wait for their end."""
        tasks = list(self._tasks.values())
        self._tasks = {}
        self._num_calls_waited = {}
        for task in tasks:
            task.cancel()
        # Wait for the cancelled tasks, so that they release their environments.
        await asyncio.gather(*tasks, return_exceptions=True)

    def _are_enough_done(self, num_returned: int) -> bool:
        num_done = sum(task.done() for task in self._tasks.values())
        late_names = [
            name
            for name, num_calls in self._num_calls_waited.items()
            if num_calls >= self._max_calls_waited
        ]
        # Late groups (unfinished in ``_max_calls_waited`` calls) are the oldest, so they are first
        # in ``_tasks`` and among the groups that are returned.
        late_tasks = [self._tasks[name] for name in late_names[:num_returned]]
        return num_done >= num_returned and all(task.done() for task in late_tasks)

    def _raise_first_error(self) -> None:
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


class PartialRollouts:
    """Names of the ``num_groups`` groups whose rollouts continue after a training step.

    The trainer saves the names in checkpoints. A name is the uid of the group and the number of
    groups in its batch: ``train-3-0-5@16``.
    """

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._name_by_uid: dict[str, str] = {}  # name of each group by uid
        self._names_to_restart: list[str] = []

    def group_names(self) -> list[str]:
        return [*self._name_by_uid.values(), *self._names_to_restart]

    def resume(self, names: Sequence[str]) -> None:
        """Restart at most ``num_groups`` of the groups ``names`` of a checkpoint.

        Their rollouts begin again, together with the next batch. Raises ``InvalidStateError`` for
        something else than a list of names.
        """
        are_group_names = isinstance(names, list) and all(
            isinstance(name, str) and _GROUP_NAME.fullmatch(name) for name in names
        )
        check_state_value(
            "under_way", names, are_group_names, "a list of names such as train-3-0-5@16"
        )
        self._names_to_restart = list(names)[: self.num_groups]
        if len(names) > self.num_groups:
            warning_format = (
                "env.rollout.carry_over=%d: groups of the checkpoint that are dropped: %s"
            )
            logger.warning(warning_format, self.num_groups, ", ".join(names[self.num_groups :]))

    def add_groups(self, batch: DataProto, envs: EnvironmentManagerBase) -> DataProto:
        """Return ``batch`` with additional groups, so that ``num_groups`` groups stay in flight.

        The rollout ends when as many groups are finished as ``batch`` has. Groups of a resumed run
        are added first, then new ones.
        """
        num_batch_groups = len(set(batch.non_tensor_batch["uid"]))
        batch_parts = [batch]
        for name in self._names_to_restart:
            uid, _, batch_size = name.partition("@")
            _, step, batch_in_step, _ = uid.split("-")
            earlier_batch = envs.gen_batch(int(step), int(batch_size), int(batch_in_step))
            batch_parts.append(select_groups(earlier_batch, [uid]))
            self._name_by_uid[uid] = name
        num_missing_groups = self.num_groups - len(self._name_by_uid)
        if num_missing_groups > 0:
            extra_batch = envs.gen_batch(
                batch.meta_info["global_step"], num_batch_groups, FIRST_EXTRA_BATCH
            )
            extra_uids = list(dict.fromkeys(extra_batch.non_tensor_batch["uid"]))
            batch_parts.append(select_groups(extra_batch, extra_uids[:num_missing_groups]))
        self._names_to_restart = []
        full_batch = DataProto.concat(batch_parts)
        for uid in full_batch.non_tensor_batch["uid"]:
            self._name_by_uid.setdefault(uid, f"{uid}@{num_batch_groups}")
        return full_batch

    def remove_returned(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            self._name_by_uid.pop(trajectory.spec.uid, None)


def select_groups(batch: DataProto, names: Collection[str]) -> DataProto:
    """Return the rows of ``batch`` whose group (uid) is in ``names``."""
    return batch[np.isin(batch.non_tensor_batch["uid"].astype(str), list(names))]
