"""Fault injection module. All processes of the tested job import it (``external_lib``).

    CHAOS_CELL       for example `engine/rollout/killed`
    CHAOS_FOLDER     folder of marker files. `reached`: the job waits at the stage; `struck`: the
                     fault was injected, the job may continue; `last`: the last evaluation began

For the faults "killed" and "hung", the process that works at the stage waits in its method until
the harness has sent the signal. For "out of memory", the first call of a method of the part at the
stage, and every later call, requests more memory than exists.

The watchdog's clock runs faster after the fault, to save time. It has normal speed before the
fault, so that a slow start of Ray does not end the job.
"""

import functools
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.dev.chaos.cells import (
    COLLECTOR,
    COLLECTOR_CLASS,
    DRIVER,
    ENGINE,
    ENVIRONMENT,
    EVALUATION,
    NODE,
    OUT_OF_MEMORY,
    RANK,
    ROLLOUT,
    UPDATE,
    parse_cell,
)
from verl.utils import watchdog
from verl.utils.driver_guard import DriverGuard
from verl.utils.watchdog import Watchdog

CELL = parse_cell(os.environ["CHAOS_CELL"])
MARKER_FOLDER = Path(os.environ["CHAOS_FOLDER"])
REACHED_MARKER = MARKER_FOLDER / "reached"
INJECTED_MARKER = MARKER_FOLDER / "struck"
LAST_EVALUATION_MARKER = MARKER_FOLDER / "last"
SIGNAL_TIMEOUT_S = 60.0  # maximum wait for the harness to send the signal
HEARTBEAT_TIMEOUT_S = 30.0  # time without heartbeats after which a driver with a fault is killed
# Number of the call of a patched method at which the fault happens; by default the first call. In
# the rollout stage some calls succeed first. An engine already gets weights once before training,
# so the first weight sync after an update is its second call.
FIRST_CALL_OF_STAGE = {
    (ENGINE, ROLLOUT): 3,
    (ENVIRONMENT, ROLLOUT): 3,
    (COLLECTOR, ROLLOUT): 2,
    (ENGINE, UPDATE): 2,
}
# Speed-up of the watchdog's clock. It is lower for two faults that the run handles without the
# watchdog: a hung environment worker is replaced within seconds, and Ray declares a node dead
# within a minute. The watchdog must not end the run before that.
CLOCK_FACTOR = {ENVIRONMENT: 15, NODE: 5}.get(CELL.part, 60)


def get_role() -> str:
    """Return the part of the training job that this process is, for example ``DRIVER``."""
    name = getattr(sys.modules["__main__"].__spec__, "name", "")
    if name == "verl.trainer.main_ppo":
        return DRIVER
    if name == "agent_system.environments.pool.worker":
        return ENVIRONMENT
    if "RANK" in os.environ:
        return RANK
    # Only a collector process has imported the module of the collector's actor class.
    return COLLECTOR if COLLECTOR_CLASS.partition(":")[0] in sys.modules else ENGINE


def read_fast_clock() -> float:
    """Return the watchdog's clock (seconds), ``CLOCK_FACTOR`` times faster after the fault."""
    if not INJECTED_MARKER.exists():
        return time.monotonic()
    return time.monotonic() + CLOCK_FACTOR * (time.time() - INJECTED_MARKER.stat().st_mtime)


def wait_for_fault() -> None:
    """Report that the stage is reached, and wait until the harness has injected the fault."""
    if INJECTED_MARKER.exists():
        return
    REACHED_MARKER.touch()
    deadline = time.monotonic() + SIGNAL_TIMEOUT_S
    while not INJECTED_MARKER.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def exhaust_memory() -> None:
    """Allocate more memory than exists: in engines and ranks with torch, elsewhere with Python."""
    INJECTED_MARKER.touch()
    if CELL.part in (ENGINE, RANK):
        import torch  # imported here, because other parts of the job do not load torch

        torch.empty(1 << 50)
    bytearray(1 << 60)


def patch_method(import_path: str, method: str, action: Callable[[], object]) -> None:
    """Patch ``method`` of the class at ``import_path`` to call ``action`` first in the stage."""
    module, name = import_path.split(":")
    patched_class: Any = getattr(importlib.import_module(module), name)
    original_method = getattr(patched_class, method)
    is_fault_due = _make_fault_condition(get_role())

    @functools.wraps(original_method)
    def call_with_fault(*args: Any, **kwargs: Any) -> Any:
        if is_fault_due():
            action()
        return original_method(*args, **kwargs)

    @functools.wraps(original_method)
    async def call_with_fault_async(*args: Any, **kwargs: Any) -> Any:
        return await call_with_fault(*args, **kwargs)

    # Ray checks which methods are coroutine functions, so replace a coroutine function by another.
    setattr(
        patched_class,
        method,
        call_with_fault_async if inspect.iscoroutinefunction(original_method) else call_with_fault,
    )


def _make_fault_condition(process_role: str) -> Callable[[], bool]:
    num_calls = 0

    def is_due() -> bool:
        nonlocal num_calls
        num_calls += 1
        if CELL.stage == EVALUATION:
            return LAST_EVALUATION_MARKER.exists()
        return num_calls >= FIRST_CALL_OF_STAGE.get((process_role, CELL.stage), 1)

    return is_due


def create_marker_at_last_evaluation() -> None:
    """Patch the driver to create a marker file when the last evaluation begins."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    original_validate = RayPPOTrainer.validate

    def mark_and_validate(self: RayPPOTrainer[Any]) -> Any:
        if self.global_step >= self.total_steps:
            LAST_EVALUATION_MARKER.touch()
        return original_validate(self)

    RayPPOTrainer.validate = mark_and_validate


def install_fault() -> None:
    """Patch methods and clocks of this process, so that the fault of the test ``CELL`` happens."""
    target_role, import_path, method = CELL.get_injection_point()
    process_role = get_role()
    if process_role == DRIVER:
        watchdog.GRACE_S *= CLOCK_FACTOR
        if CELL.part == DRIVER:
            setattr(watchdog, "DriverGuard", lambda _: DriverGuard(HEARTBEAT_TIMEOUT_S))  # noqa: B010
        init_with_fast_clock = functools.partialmethod(Watchdog.__init__, clock=read_fast_clock)
        setattr(Watchdog, "__init__", init_with_fast_clock)  # noqa: B010
    if process_role == target_role:
        patch_method(
            import_path, method, exhaust_memory if CELL.fault == OUT_OF_MEMORY else wait_for_fault
        )
    if process_role == DRIVER and CELL.stage == EVALUATION:
        create_marker_at_last_evaluation()


install_fault()
