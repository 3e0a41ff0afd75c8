"""Environment pool: environments with a deadline for every call. Failed workers are replaced while
the others continue.

    trajectory ──open_session()──> a free slot ──reset/step──> worker process 0: environments 0, 1
    trajectory ──open_session()──> (waits)                     worker process 1: environments 0, 1
                                                               spare process, if starting is slow

A slot is one environment, which many sessions use one after another. A worker fails if it dies,
hangs or sends an invalid message. Then its pending calls raise ``EnvFailure``, and so does the next
call of its other sessions. The spare replaces it immediately, and a new spare is started. A pool
belongs to one asyncio loop.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from agent_system.environments.env import EnvFailure, Observation, Step, Task, WorkerStartError
from agent_system.environments.env_registry import (
    build_missing_extra_error,
    find_entry,
    get_package,
)
from agent_system.environments.pool.processes import ProcessSlot, WorkerProcess
from agent_system.environments.pool.threads import LocalSlot
from agent_system.environments.pool.wire import SURROGATES
from agent_system.environments.settings import EnvSettings

__all__ = ["EnvFailure", "EnvironmentPool", "PoolSession", "WorkerStartError"]

logger = logging.getLogger(__name__)
PLACEMENTS = ("inline", "thread", "locked", "process")  # explained in ``Env``
# The pool keeps a started spare worker if starting a worker takes longer than this, in seconds.
SLOW_START_S = 1.0
START_ATTEMPTS = 3  # attempts to start a worker before the pool gives up


Slot = ProcessSlot | LocalSlot


class SlotQueue:
    """Free slots (environments of the pool), and a queue of coroutines that wait for one."""

    def __init__(self) -> None:
        self.free_slots: list[Slot] = []
        self._waiters: deque[asyncio.Future[Slot]] = deque()
        self._waiter_error: Exception | None = None

    async def acquire_slot(self, group: str | None = None) -> Slot:
        """Return a free slot. The coroutine that has waited longest gets the next one.

        Prefer a worker that has a session of ``group``, then the worker with the fewest sessions.
        """
        if self._waiter_error is not None:
            raise self._waiter_error
        if self.free_slots:
            # False sorts before True: workers with a session of the group come first, then those
            # with the fewest sessions. Sessions without a group have the key None.
            best_slot = min(
                self.free_slots,
                key=lambda slot: (
                    group is None or group not in slot.open_sessions,
                    slot.open_sessions.total(),
                ),
            )
            self.free_slots.remove(best_slot)
            return best_slot
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            # The caller was cancelled just after it received a slot: return the slot to the queue.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.return_slot(waiter.result())
            raise

    def return_slot(self, slot: Slot) -> None:
        """Pass ``slot`` to the first waiting coroutine, or mark it as free."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self.free_slots.append(slot)

    def drop_dead_slots(self) -> None:
        # Slots in use are not in the list. Their sessions fail at the next call.
        self.free_slots = [slot for slot in self.free_slots if slot.is_alive]

    def fail_waiters(self, error: Exception) -> None:
        """Raise ``error`` in all waiting coroutines and in all later calls of ``acquire_slot``."""
        self._waiter_error = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)


class PoolSession:
    """One environment, used by one trajectory."""

    def __init__(self, pool: "EnvironmentPool", slot: Slot) -> None:
        self._pool = pool
        self._slot = slot

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the episode of ``task`` and ``seed``. Raises ``EnvFailure``."""
        args = {"task": task, "seed": int(seed)}
        return await self._call_worker("reset", args, self._pool.reset_timeout_s)

    async def step(self, action: str) -> Step:
        """Apply ``action``; return observation, reward, done, info. Raises ``EnvFailure``."""
        # A lone surrogate cannot be encoded as UTF-8, so replace it.
        encodable_action = SURROGATES.sub("\ufffd", action)
        return await self._call_worker(
            "step", {"action": encodable_action}, self._pool.step_timeout_s
        )

    async def _call_worker(self, method: str, args: dict[str, Any], timeout_s: float) -> Any:
        try:
            return await self._slot.call(method, args, timeout_s)
        except EnvFailure as failure:
            self._pool.counts[f"failed_{failure.kind}"] += 1
            raise


class EnvironmentPool:
    """Pool of ``num_workers`` x ``envs_per_worker`` environments of ``env_name``.

    ``section`` contains the settings of the package, as an object or as a mapping. Timeouts are in
    seconds. The placement (process or thread in which environments run) is the argument, else that
    of the settings, else ``placement`` of the environment class, else ``process``::

        async with EnvironmentPool("alfworld", section, num_workers=2, envs_per_worker=8) as pool:
            async with pool.open_session() as env:
                observation = await env.reset(task, seed)
                observation, reward, done, info = await env.step("look")
    """

    def __init__(
        self,
        env_name: str,
        section: EnvSettings | Mapping[str, Any] | None = None,
        num_workers: int = 1,
        envs_per_worker: int = 1,
        reset_timeout_s: float = 60.0,
        step_timeout_s: float = 30.0,
        *,
        start_timeout_s: float = 180.0,
        placement: str | None = None,
    ) -> None:
        if num_workers < 1 or envs_per_worker < 1:
            raise ValueError(
                f"num_workers={num_workers}, envs_per_worker={envs_per_worker}: allowed are "
                "integers of 1 or more"
            )
        self.env_name = env_name
        # Settings as JSON values, from which a worker process builds equal settings.
        self.section: dict[str, Any] = (
            # Omit nulls, so that the worker fills in the same defaults.
            section.model_dump(mode="json", exclude_none=True)
            if isinstance(section, EnvSettings)
            else dict(section or {})
        )
        self.num_workers = num_workers
        self.envs_per_worker = envs_per_worker
        self.reset_timeout_s = reset_timeout_s
        self.step_timeout_s = step_timeout_s
        self.start_timeout_s = start_timeout_s
        self.placement = self._choose_placement(placement)
        # Counts by name: ``restarts`` of workers, and failed calls of each kind, such as
        # ``failed_timeout``.
        self.counts: Counter[str] = Counter()
        self._workers: list[WorkerProcess] = []
        self._spare_worker: WorkerProcess | None = None
        self._keeps_spare_worker = False
        self._local_slots: list[LocalSlot] = []
        self._slot_queue = SlotQueue()
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def max_sessions(self) -> int:
        return self.num_workers * self.envs_per_worker

    @property
    def worker_pids(self) -> list[int]:
        pids = [worker.process_id for worker in self._workers if worker.is_alive]
        return [pid for pid in pids if pid is not None]

    async def start(self) -> "EnvironmentPool":
        """Start the workers and wait for them. Raises ``WorkerStartError`` or
        ``MissingExtraError``.
        """
        if self.placement != "process":
            package = get_package(self.env_name)
            for _ in range(self.max_sessions):
                slot = LocalSlot(package, self.section, self.placement)
                self._local_slots.append(slot)
                self._slot_queue.return_slot(slot)
            return self
        start_results = await asyncio.gather(
            *(self._start_worker() for _ in range(self.num_workers)), return_exceptions=True
        )
        # Skip a worker that died in the meantime: ``_replace_worker`` adds its replacement.
        live_workers = [
            worker
            for worker in start_results
            if isinstance(worker, WorkerProcess) and worker.is_alive
        ]
        self._workers = [*self._workers, *live_workers]
        errors = [error for error in start_results if isinstance(error, BaseException)]
        if errors:
            # Stop the workers that did start.
            await self.close()
            raise errors[0]
        for worker in live_workers:
            self._add_slots(worker)
        max_start_duration_s = max(
            (worker.start_duration_s for worker in self._workers), default=0.0
        )
        self._keeps_spare_worker = max_start_duration_s > SLOW_START_S
        if self._keeps_spare_worker:
            self._run_in_background(self._start_spare_worker())
        return self

    async def __aenter__(self) -> "EnvironmentPool":
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def open_session(self, group: str | None = None) -> AsyncIterator[PoolSession]:
        """Wait for a free environment and reserve it for the ``async with`` block.

        Sessions with the same ``group`` (uid) share a worker if possible, so that a failed worker
        affects few groups. Raises ``WorkerStartError`` if no worker can be started any more.
        """
        if self._is_closed:
            raise RuntimeError("the environment pool is closed")
        slot = await self._slot_queue.acquire_slot(group)
        slot.open_sessions[group] += 1
        try:
            yield PoolSession(self, slot)
        finally:
            # Update the counts before ``return_slot``: they decide which slot is next.
            slot.open_sessions[group] -= 1
            if not slot.open_sessions[group]:
                # Otherwise the counter would keep a key for every group of the run.
                del slot.open_sessions[group]
            if slot.is_alive and not self._is_closed:
                self._slot_queue.return_slot(slot)

    async def close(self) -> None:
        """Stop every worker and its child processes. Open sessions fail. May be called twice."""
        self._is_closed = True
        for task in list(self._background_tasks):
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        spare_worker, self._spare_worker = self._spare_worker, None
        workers_and_slots: list[WorkerProcess | LocalSlot] = [*self._workers, *self._local_slots]
        if spare_worker is not None:
            workers_and_slots.append(spare_worker)
        await asyncio.gather(*(worker.close() for worker in workers_and_slots))
        self._workers = []
        self._local_slots = []
        self._slot_queue.fail_waiters(RuntimeError("the environment pool is closed"))

    # ---- workers ----

    def _choose_placement(self, placement: str | None) -> str:
        placement = placement or self.section.get("placement")
        if placement is None:
            package = get_package(self.env_name)
            placement = getattr(package.make, "placement", "process")
            # For ``process`` the worker reads the settings and reports errors in them.
            if placement != "process":
                placement = package.read_settings(self.section).chosen_placement() or placement
        if placement not in PLACEMENTS:
            raise ValueError(
                f"placement {placement!r} of {self.env_name!r}; allowed: {', '.join(PLACEMENTS)}"
            )
        return placement

    async def _start_worker(self) -> WorkerProcess:
        worker = WorkerProcess(
            find_entry(self.env_name).import_path, self.section, self._handle_worker_death
        )
        try:
            return await worker.start(self.start_timeout_s)
        except WorkerStartError as error:
            await worker.wait_for_exit()
            if error.missing_module:
                cause = ModuleNotFoundError(name=error.missing_module)
                raise build_missing_extra_error(self.env_name, cause) from error
            raise
        except asyncio.CancelledError:
            await worker.wait_for_exit()
            raise

    def _add_slots(self, worker: WorkerProcess) -> None:
        for index in range(self.envs_per_worker):
            self._slot_queue.return_slot(ProcessSlot(worker, index))

    def _handle_worker_death(self, worker: WorkerProcess, detail: str) -> None:
        self._slot_queue.drop_dead_slots()
        self._run_in_background(worker.wait_for_exit())
        if worker is self._spare_worker:
            self._spare_worker = None
            self._run_in_background(self._start_spare_worker())
            return
        logger.warning("%s; replacing it", detail)
        self.counts["restarts"] += 1
        self._run_in_background(self._replace_worker(worker))

    async def _replace_worker(self, dead_worker: WorkerProcess) -> None:
        # Take the spare worker before the first await: another worker may die meanwhile and its
        # replacement would take the same spare.
        worker, self._spare_worker = self._spare_worker, None
        if worker is None:
            worker = await self._start_worker_with_retries()
        self._workers = [
            other_worker for other_worker in self._workers if other_worker is not dead_worker
        ]
        if worker is None:
            logger.error("an environment worker could not be replaced; %d left", len(self._workers))
            if not self._workers:
                reason = (
                    f"all environment workers of {self.env_name!r} failed, and none can be started"
                )
                self._slot_queue.fail_waiters(WorkerStartError(reason))
            return
        self._workers.append(worker)
        self._add_slots(worker)
        if self._keeps_spare_worker:
            await self._start_spare_worker()

    async def _start_spare_worker(self) -> None:
        spare_worker = await self._start_worker_with_retries()
        if spare_worker is not None and self._spare_worker is None:
            self._spare_worker = spare_worker
        # Another asyncio task started a spare worker meanwhile. A second one would waste memory.
        elif spare_worker is not None:
            await spare_worker.close()

    async def _start_worker_with_retries(self) -> WorkerProcess | None:
        for attempt in range(START_ATTEMPTS):
            try:
                return await self._start_worker()
            except (WorkerStartError, ImportError, OSError) as error:
                attempt_text = f"{attempt + 1} of {START_ATTEMPTS}"
                logger.warning("environment worker start %s failed: %s", attempt_text, error)
                # Wait 0.2, 0.4, 0.8 s: a shortage of memory or processes may be temporary.
                await asyncio.sleep(0.2 * 2**attempt)
        return None

    def _run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        # Keep a reference: the loop has only weak ones, and a task could be garbage collected.
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
