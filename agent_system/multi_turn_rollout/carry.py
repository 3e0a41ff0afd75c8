"""Groups that are played over several calls: whoever is slow goes on while others are learned from.

    call 1   start a b c d e       a b c are done  ──▶ handed out     d e go on
    call 2   start f g h           d f g are done  ──▶ handed out     e h go on

Nothing is dropped, so that slow tasks keep their share of what is learned from; they only come
later.
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
FIRST_DRAW = 4  # of the tasks that are under way beside the first batch; lower ones replace broken


class GroupsUnderWay(Generic[T]):
    """Coroutines by name, in the order in which they were started, with the number of calls of
    ``take`` that each has outlasted.

    What is started after ``patience`` calls is waited for.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._tasks: dict[str, asyncio.Task[T]] = {}
        self._age: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, coroutine: Coroutine[Any, Any, T]) -> None:
        """Run ``coroutine``; raises ``ValueError`` for a name that is under way."""
        if name in self._tasks:
            coroutine.close()
            raise ValueError(f"group {name!r} is played already")
        self._tasks[name] = asyncio.ensure_future(coroutine)
        self._age[name] = 0

    async def take(self, keep: int) -> list[T]:
        """Wait until all but ``keep`` are done and return exactly these, the oldest first; at most
        ``keep`` go on. Raises what the first one to fail raised, and ends the others.
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
        """End everything that is under way."""
        tasks = list(self._tasks.values())
        self._tasks = {}
        self._age = {}
        for task in tasks:
            task.cancel()
        # Awaited, so that they give back what they have been lent.
        await asyncio.gather(*tasks, return_exceptions=True)

    def _enough(self, wanted: int) -> bool:
        done = sum(task.done() for task in self._tasks.values())
        late = [name for name, age in self._age.items() if age >= self._patience]
        # Who is late comes first in the order of starts, and so is among those handed out.
        return done >= wanted and all(self._tasks[name].done() for name in late[:wanted])

    def _raise_first(self) -> None:
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


class CarriedGroups:
    """The groups that go on from step to step, ``number`` of them; kept where the trainer is, which
    saves them.

    A name is the uid, and how many groups the batch had that it came with: ``train-3-0-5@16``.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._under_way: dict[str, str] = {}  # uid and name
        self._again: list[str] = []

    def names(self) -> list[str]:
        """The groups that are under way."""
        return [*self._under_way.values(), *self._again]

    def resume(self, names: Sequence[str]) -> None:
        """Have the groups called ``names`` played from their beginning with the next batch;
        ``number`` of them, where it has become smaller.
        """
        self._again = list(names)[: self.number]
        if len(names) > self.number:
            left = ", ".join(names[self.number :])
            logger.warning(
                "env.rollout.carry_over=%d: groups of the checkpoint that are not played again: %s",
                self.number,
                left,
            )

    def begin(self, batch: DataProto, envs: EnvironmentManagerBase) -> DataProto:
        """``batch`` and, where fewer than ``number`` groups are under way, as many more: those that
        a resumed run had begun, then new ones.
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
        """Note which groups were handed out."""
        for trajectory in trajectories:
            self._under_way.pop(trajectory.job.uid, None)


def _groups(batch: DataProto, names: Sequence[str]) -> DataProto:
    return batch[np.isin(batch.non_tensor_batch["uid"].astype(str), list(names))]
