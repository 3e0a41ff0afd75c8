"""Queue of sessions that wait for a free environment."""

import asyncio
from collections import deque

from agent_system.environments.pool.processes import ProcessSlot
from agent_system.environments.pool.threads import LocalSlot

Slot = ProcessSlot | LocalSlot


class SlotQueue:
    """Free slots, and a first-come first-served queue of waiters."""

    def __init__(self) -> None:
        self.free: list[Slot] = []
        self._waiters: deque[asyncio.Future[Slot]] = deque()
        self._error: Exception | None = None

    async def acquire_slot(self, group: str | None = None) -> Slot:
        """Return a free slot. Wait if there is none.

        Prefer a worker that has a session of ``group``, then the worker with the fewest sessions.
        Raises the error given to ``fail_waiters``.
        """
        if self._error is not None:
            raise self._error
        if self.free:
            return self._pop_best_slot(group)
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            # The caller was cancelled just after it received a slot: return the slot to the queue.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.put(waiter.result())
            raise

    def put(self, slot: Slot) -> None:
        """Give ``slot`` to the first waiter, or add it to the free slots."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self.free.append(slot)

    def drop_dead_slots(self) -> None:
        """Remove the free slots of failed workers."""
        # Slots in use are not in the list. Their sessions fail at the next call.
        self.free = [slot for slot in self.free if slot.is_alive]

    def fail_waiters(self, error: Exception) -> None:
        """Make all waiters, and all later calls of ``acquire_slot``, raise ``error``."""
        self._error = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _pop_best_slot(self, group: str | None) -> Slot:
        def sort_key(index: int) -> tuple[bool, int]:
            slot = self.free[index]
            # False sorts first: a worker with a session of the group precedes all others.
            return (not slot.serves_group(group), slot.num_sessions)

        return self.free.pop(min(range(len(self.free)), key=sort_key))
