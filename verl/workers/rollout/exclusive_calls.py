"""Calls of a rollout worker to its engine that need an idle engine: update weights, sleep, wake."""

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


class ExclusiveCalls(ABC):
    """Engine calls that run while no request runs. New requests wait until the call has finished.

    Each call first waits for running requests. It raises ``EngineError`` if requests still run
    after the request timeout.
    """

    @property
    @abstractmethod
    def _started_engine(self) -> RolloutEngine: ...

    @abstractmethod
    async def _pause_requests(self, purpose: str) -> None:
        """Delay new requests and wait until none runs.

        A second call waits until the first has called ``_resume_requests``.
        """

    @abstractmethod
    def _resume_requests(self) -> None:
        """Start delayed requests and accept new ones."""

    @abstractmethod
    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in the thread of the engine."""

    async def update_weights(self, weights: Weights, version: int) -> dict[str, int]:
        """Load new weights when no request runs and set the policy version to ``version``.

        Returns a checksum of each weight that the engine received, by name. Raises
        ``EngineError`` if requests still run after the request timeout, and if the engine does not
        hold the new weights afterwards.
        """
        async with self._exclusive_access("update_weights"):
            return await self._in_thread(
                load_and_verify_weights, self._started_engine, weights, version
            )

    async def connect(self, info: Mapping[str, object]) -> None:
        """Prepare a ``ReceivingEngine`` for weight transfers."""
        async with self._exclusive_access("connect"):
            await self._in_thread(self._receiving_engine.connect, info)

    async def begin_update(self) -> None:
        """Begin an update in chunks when no request runs. New requests wait for
        ``finish_update``.
        """
        await self._pause_requests("begin_update")
        try:
            await self._in_thread(self._receiving_engine.begin_update)
        except BaseException:
            self._resume_requests()
            raise

    async def receive(self, info: Mapping[str, object]) -> None:
        """Load one chunk of the weights."""
        await self._in_thread(self._receiving_engine.receive, info)

    async def finish_update(self, version: int) -> dict[str, int]:
        """Complete the update and return a checksum of each received weight, by name.

        Raises ``EngineError`` if the engine does not hold the received weights.
        """
        try:
            return await self._in_thread(self._receiving_engine.finish_update, version)
        finally:
            self._resume_requests()

    async def sleep(self, level: SleepLevel = 1) -> None:
        """Free accelerator memory for the trainer when no request runs.

        Level 2 discards the weights: new ones must be loaded after ``wake``.
        """
        async with self._exclusive_access("sleep"):
            await self._in_thread(self._started_engine.sleep, level)

    async def wake(self, part: EnginePart | None = None) -> None:
        """Allocate accelerator memory again, for one part or for all."""
        async with self._exclusive_access("wake"):
            await self._in_thread(self._started_engine.wake, part)

    @contextlib.asynccontextmanager
    async def _exclusive_access(self, purpose: str) -> AsyncIterator[None]:
        await self._pause_requests(purpose)
        try:
            yield
        finally:
            self._resume_requests()

    @property
    def _receiving_engine(self) -> ReceivingEngine:
        # Not checked here: only callers whose engine is a ReceivingEngine may use it.
        return cast(ReceivingEngine, self._started_engine)


def load_and_verify_weights(
    engine: RolloutEngine, weights: Weights, version: int
) -> dict[str, int]:
    """Load ``weights`` into ``engine``, verify them and return their checksums by name.

    Only weights that the engine can return are verified. Raises ``EngineError`` if one differs.
    """
    # Imported here because it loads torch. The engine must set environment variables before that.
    from verl.workers.rollout.weight_receipt import WeightReceipt

    read_held_weights = engine.held_weights if hasattr(engine, "held_weights") else dict
    receipt = WeightReceipt(read_held_weights())
    engine.update_weights(receipt.record_weights(weights), version)
    receipt.verify_held(read_held_weights())
    return receipt.received
