"""Who gets the next free environment."""

import asyncio
from collections import deque

from agent_system.environments.pool.processes import ProcessSlot
from agent_system.environments.pool.threads import LocalSlot

Slot = ProcessSlot | LocalSlot


class SlotBoard:
    """Free slots and those who wait for one, first come first served."""

    def __init__(self) -> None:
        self.free: list[Slot] = []
        self._waiters: deque[asyncio.Future[Slot]] = deque()
        self._broken: Exception | None = None

    async def take(self, group: str | None = None) -> Slot:
        """A slot of the worker that plays ``group``, else of the least busy one, as soon as there
        is any slot.

        Raises what ``fail`` was given.
        """
        if self._broken is not None:
            raise self._broken
        if self.free:
            return self._pick(group)
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            # Given a slot and cancelled in the same moment: it must not be lost.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.put(waiter.result())
            raise

    def put(self, slot: Slot) -> None:
        """Offer ``slot`` to the first who waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self.free.append(slot)

    def drop_dead(self) -> None:
        """Forget the free slots that can no longer take calls."""
        # Slots that are lent out are not here; their sessions fail at the next call.
        self.free = [slot for slot in self.free if slot.alive]

    def fail(self, error: Exception) -> None:
        """No slot will ever come: tell everybody."""
        self._broken = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _pick(self, group: str | None) -> Slot:
        def unsuitability(place: int) -> tuple[bool, int]:
            slot = self.free[place]
            # False sorts first: a worker of the group before the least busy one.
            return (not slot.plays(group), slot.load)

        return self.free.pop(min(range(len(self.free)), key=unsuitability))
