"""What a rollout worker has its engine do while no request runs: take weights, sleep, wake."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from typing import ParamSpec, TypeVar, cast

from verl.workers.rollout.base import (
    EnginePart,
    ReceivingEngine,
    RolloutEngine,
    SleepLevel,
    Weights,
)

P = ParamSpec("P")
T = TypeVar("T")


class IdleCalls(ABC):
    """Calls of a worker that wait until nothing runs; requests that come meanwhile wait for them.

    Each raises ``EngineError`` when requests still run after the request deadline.
    """

    @property
    @abstractmethod
    def _engine(self) -> RolloutEngine: ...

    @abstractmethod
    async def _pause(self, purpose: str) -> None:
        """Hold requests back and wait until none runs; nothing else pauses before ``_go_on``."""

    @abstractmethod
    def _go_on(self) -> None:
        """Let requests in again."""

    @abstractmethod
    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in the thread of the engine."""

    async def update_weights(self, weights: Weights, version: int) -> dict[str, int]:
        """Load new weights once no request runs; ``version`` marks what is sampled from then on.
        Returns the fingerprints of those that the engine took, by name.

        Raises ``EngineError`` when requests still run after the request deadline (a result has one
        policy version), and where the engine holds other weights afterwards.
        """
        async with self._paused("update_weights"):
            return await self._in_thread(take_weights, self._engine, weights, version)

    async def connect(self, info: Mapping[str, object]) -> None:
        """Have an engine that fetches weights itself get ready for that."""
        async with self._paused("connect"):
            await self._in_thread(self._receiver.connect, info)

    async def begin_update(self) -> None:
        """Expect new weights in pieces, once no request runs; requests are held back until
        ``finish_update``.
        """
        await self._pause("begin_update")
        try:
            await self._in_thread(self._receiver.begin_update)
        except BaseException:
            self._go_on()
            raise

    async def receive(self, info: Mapping[str, object]) -> None:
        """Load a piece of the weights."""
        await self._in_thread(self._receiver.receive, info)

    async def finish_update(self, version: int) -> dict[str, int]:
        """All pieces have come; the fingerprints of the weights that the engine took, by name.

        Raises ``EngineError`` where it holds others.
        """
        try:
            return await self._in_thread(self._receiver.finish_update, version)
        finally:
            self._go_on()

    async def sleep(self, level: SleepLevel = 1) -> None:
        """Give accelerator memory to the trainer, once no request runs; on level 2 the weights are
        forgotten, and new ones have to come.
        """
        async with self._paused("sleep"):
            await self._in_thread(self._engine.sleep, level)

    async def wake(self, part: EnginePart | None = None) -> None:
        """Take accelerator memory back, for one part or for all."""
        async with self._paused("wake"):
            await self._in_thread(self._engine.wake, part)

    @contextlib.asynccontextmanager
    async def _paused(self, purpose: str) -> AsyncIterator[None]:
        await self._pause(purpose)
        try:
            yield
        finally:
            self._go_on()

    @property
    def _receiver(self) -> ReceivingEngine:
        # Who asks knows which engine this is.
        return cast(ReceivingEngine, self._engine)


def take_weights(engine: RolloutEngine, weights: Weights, version: int) -> dict[str, int]:
    """Load ``weights`` and read back what can be read; the fingerprints of those taken, by name.

    Raises ``EngineError`` where the engine holds others.
    """
    # Not above: it loads torch, before which an engine sets what torch reads at its import.
    from verl.workers.rollout.arrival import Arrival

    read = engine.held_weights if hasattr(engine, "held_weights") else dict
    arrival = Arrival(read())
    engine.update_weights(arrival.through(weights), version)
    arrival.check(read())
    return arrival.taken
