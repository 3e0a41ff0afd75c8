"""Partial rollouts: groups that are not finished continue while finished ones are trained on.

    call 1   start a b c d e       a b c are done  ──▶ returned     d e continue
    call 2   start f g h           d f g are done  ──▶ returned     e h continue

No group is dropped. Slow tasks keep their share of the training data and are only returned later.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.multi_turn_rollout.trajectory import Trajectory
from verl.protocol import DataProto

logger = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_DRAW = 4  # draw number of extra groups; lower draws replace failed batches


class GroupsUnderWay(Generic[T]):
    """Running coroutines by name in order of start, with the number of ``take_finished`` calls each
    has outlasted.

    A coroutine that has outlasted ``patience`` calls is waited for.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._tasks: dict[str, asyncio.Task[T]] = {}
        self._age: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, coroutine: Coroutine[Any, Any, T]) -> None:
        """Start ``coroutine``. Raises ``ValueError`` for a name that is already running."""
        if name in self._tasks:
            coroutine.close()
            raise ValueError(f"group {name!r} is already in flight; names must be unique")
        self._tasks[name] = asyncio.ensure_future(coroutine)
        self._age[name] = 0

    async def take(self, keep: int) -> list[T]:
        """Wait until all but ``keep`` are done, and return exactly these results, the oldest first.

        Raises the first error of a coroutine and cancels the others.
        """
        wanted = max(len(self._tasks) - keep, 0)
        try:
            while not self._enough(wanted):
                running = [task for task in self._tasks.values() if not task.done()]
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                self._raise_first()
            self._raise_first()
        except BaseException:
            await self.cancel()
            raise
        done = [name for name, task in self._tasks.items() if task.done()][:wanted]
        results = [self._tasks.pop(name).result() for name in done]
        for name in done:
            del self._age[name]
        for name in self._age:
            self._age[name] += 1
        return results

    async def cancel(self) -> None:
        """Cancel all running coroutines and wait for their end."""
        tasks = list(self._tasks.values())
        self._tasks = {}
        self._age = {}
        for task in tasks:
            task.cancel()
        # Awaited, so that they release their environments.
        await asyncio.gather(*tasks, return_exceptions=True)

    def _enough(self, wanted: int) -> bool:
        done = sum(task.done() for task in self._tasks.values())
        late = [name for name, age in self._age.items() if age >= self._patience]
        # Late groups come first in the order of starts, and so are among those returned.
        return done >= wanted and all(self._tasks[name].done() for name in late[:wanted])

    def _raise_first(self) -> None:
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


class CarriedGroups:
    """Names of the ``num_groups`` groups that continue from step to step, kept in the trainer's
    process.

    The trainer saves them in checkpoints. A name is the uid and the number of groups of its batch:
    ``train-3-0-5@16``.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._under_way: dict[str, str] = {}  # uid and name
        self._again: list[str] = []

    def names(self) -> list[str]:
        """Return the names of the groups in flight."""
        return [*self._under_way.values(), *self._again]

    def resume(self, names: Sequence[str]) -> None:
        """Restart the groups ``names`` with the next batch, at most ``num_groups`` of them."""
        self._again = list(names)[: self.number]
        if len(names) > self.number:
            left = ", ".join(names[self.number :])
            logger.warning(
                "env.rollout.carry_over=%d: groups of the checkpoint that are dropped: %s",
                self.number,
                left,
            )

    def begin(self, batch: DataProto, envs: EnvironmentManagerBase) -> DataProto:
        """Return ``batch`` with additional groups, so that ``num_groups`` groups are in flight.

        Groups of a resumed run are started first, then new ones.
        """
        groups = len(set(batch.non_tensor_batch["uid"]))
        parts = [batch]
        for name in self._again:
            uid, _, size = name.partition("@")
            _, step, draw, _ = uid.split("-")
            parts.append(_groups(envs.gen_batch(int(step), int(size), int(draw)), [uid]))
            self._under_way[uid] = name
        lacking = self.number - len(self._under_way)
        if lacking > 0:
            more = envs.gen_batch(batch.meta_info["global_step"], groups, FIRST_DRAW)
            parts.append(_groups(more, list(dict.fromkeys(more.non_tensor_batch["uid"]))[:lacking]))
        self._again = []
        whole = DataProto.concat(parts)
        for uid in whole.non_tensor_batch["uid"]:
            self._under_way.setdefault(uid, f"{uid}@{groups}")
        return whole

    def settle(self, trajectories: Sequence[Trajectory]) -> None:
        """Remove the groups of ``trajectories``, which were returned."""
        for trajectory in trajectories:
            self._under_way.pop(trajectory.job.uid, None)


def _groups(batch: DataProto, names: Sequence[str]) -> DataProto:
    return batch[np.isin(batch.non_tensor_batch["uid"].astype(str), list(names))]
