"""Fault injection module, which all processes of the tested job import (``external_lib``).

    CHAOS_CELL       for example `engine/mid-play/killed`
    CHAOS_FOLDER     folder of marker files. `reached`: the job waits at the stage; `struck`: the
                     fault was injected, the job may continue; `last`: the last evaluation began

For the faults "killed" and "hung", the process that works at the stage waits in its method until
the harness has sent the signal. For "out of memory", a method of the part requests more memory than
exists, from that call on.

The watchdog's clock runs faster only after the fault. So a slow start of Ray does not end the job.
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
    DRIVER,
    ENGINE,
    ENVIRONMENT,
    EVALUATION,
    MEMORY,
    NODE,
    PLAY,
    RANK,
    SAVE,
    START,
    UPDATE,
    cell_of,
)
from verl.utils import watchdog
from verl.utils.guard import Guard
from verl.utils.watchdog import Watchdog

CELL = cell_of(os.environ["CHAOS_CELL"])
FOLDER = Path(os.environ["CHAOS_FOLDER"])
REACHED = FOLDER / "reached"
STRUCK = FOLDER / "struck"
LAST = FOLDER / "last"
PATIENCE_S = 60.0  # maximum wait for the harness to send the signal
SILENT_S = 30.0  # limit without heartbeats for a driver with a fault
# Number of the call at which a stage begins. The rollout stage skips the first calls. An engine
# gets weights once before training.
FROM_CALL = {(ENGINE, PLAY): 3, (ENVIRONMENT, PLAY): 3, (COLLECTOR, PLAY): 2, (ENGINE, UPDATE): 2}
# Speed-up of the watchdog's clock. A hung environment worker is replaced within seconds, and Ray
# declares a node dead within a minute. Neither may count as a stall, so these values are lower.
HASTE = {ENVIRONMENT: 15, NODE: 5}.get(CELL.part, 60)

ENGINE_CLASS = "verl.workers.rollout.hf:HFEngine"
RANK_CLASS = "verl.workers.actor:ActorWorker"
TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
PLAYER = "agent_system.multi_turn_rollout.collector_worker:CollectorWorker"
# Ray stores the methods of an actor's class before they are patched, so patch a class it uses.
PLAY_OF_ONE = "agent_system.multi_turn_rollout.trajectory_player:TrajectoryPlayer"
POOL = "agent_system.environments.pool.environment_pool:EnvironmentPool"
LINE = "agent_system.environments.env_package.number_line.package:NumberLineEnv"

# Process role, class and method that work at a stage.
WORKS = {
    START: (RANK, "verl.workers.engine:TrainEngine", "__init__"),
    PLAY: (ENGINE, ENGINE_CLASS, "step"),
    UPDATE: (RANK, RANK_CLASS, "update_actor"),
    SAVE: (RANK, RANK_CLASS, "save_checkpoint"),
    EVALUATION: (ENGINE, ENGINE_CLASS, "step"),
}
# Start-up methods of the parts that start later than the training rank.
LATE = {
    COLLECTOR: (COLLECTOR, POOL, "start"),
    ENVIRONMENT: (ENVIRONMENT, LINE, "__init__"),
}
RUNS_OUT = {
    (ENGINE, START): (ENGINE, ENGINE_CLASS, "__init__"),
    (ENGINE, UPDATE): (ENGINE, ENGINE_CLASS, "update_weights"),
    (ENVIRONMENT, PLAY): (ENVIRONMENT, LINE, "step"),
    (ENVIRONMENT, EVALUATION): (ENVIRONMENT, LINE, "step"),
    (COLLECTOR, PLAY): (COLLECTOR, PLAY_OF_ONE, "play"),
    (COLLECTOR, EVALUATION): (COLLECTOR, PLAY_OF_ONE, "play"),
    (DRIVER, START): (DRIVER, TRAINER, "__init__"),
    (DRIVER, PLAY): (DRIVER, TRAINER, "play"),
    (DRIVER, UPDATE): (DRIVER, TRAINER, "update_actor"),
    (DRIVER, SAVE): (DRIVER, TRAINER, "save"),
    (DRIVER, EVALUATION): (DRIVER, TRAINER, "validate"),
}


def role() -> str:
    """Return the part that this process is in the job."""
    name = getattr(sys.modules["__main__"].__spec__, "name", "")
    if name == "verl.trainer.main_ppo":
        return DRIVER
    if name == "agent_system.environments.pool.worker":
        return ENVIRONMENT
    if "RANK" in os.environ:
        return RANK
    # Ray has imported the module of the actor's class in this process.
    return COLLECTOR if PLAYER.partition(":")[0] in sys.modules else ENGINE


def hastened() -> float:
    """Return the watchdog's clock in seconds. It runs ``HASTE`` times faster after the fault."""
    now = time.monotonic()
    return now + HASTE * (time.time() - STRUCK.stat().st_mtime) if STRUCK.exists() else now


def stand() -> None:
    """Mark the stage as reached, and wait until the fault was injected."""
    if STRUCK.exists():
        return
    REACHED.touch()
    deadline = time.monotonic() + PATIENCE_S
    while not STRUCK.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def run_out() -> None:
    """Allocate more memory than exists, with torch in engine and rank, else with Python."""
    STRUCK.touch()
    if CELL.part in (ENGINE, RANK):
        import torch  # loaded there already; an environment worker starts without it

        torch.empty(1 << 50)
    bytearray(1 << 60)


def before(place: str, method: str, deed: Callable[[], object]) -> None:
    """Patch ``method`` of the class at import path ``place`` to call ``deed`` first.

    The calls start when the stage is reached.
    """
    module, name = place.split(":")
    owner: Any = getattr(importlib.import_module(module), name)
    whole = getattr(owner, method)
    due = _due(role())

    @functools.wraps(whole)
    def struck(*args: Any, **kwargs: Any) -> Any:
        if due():
            deed()
        return whole(*args, **kwargs)

    @functools.wraps(whole)
    async def struck_later(*args: Any, **kwargs: Any) -> Any:
        return await struck(*args, **kwargs)

    # Ray checks which methods are coroutine functions, so keep the kind of the method.
    setattr(owner, method, struck_later if inspect.iscoroutinefunction(whole) else struck)


def _due(mine: str) -> Callable[[], bool]:
    calls = 0

    def due() -> bool:
        nonlocal calls
        calls += 1
        if CELL.stage == EVALUATION:
            return LAST.exists()
        return calls >= FROM_CALL.get((mine, CELL.stage), 1)

    return due


def mark_the_last_evaluation() -> None:
    """Patch the driver to create the file ``LAST`` when the last evaluation begins."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    validate = RayPPOTrainer.validate

    def marked(self: RayPPOTrainer[Any]) -> Any:
        if self.global_step >= self.total_steps:
            LAST.touch()
        return validate(self)

    RayPPOTrainer.validate = marked


def install() -> None:
    """Patch the methods and clocks of this process for the cell ``CELL``."""
    works = LATE.get(CELL.part, WORKS[START]) if CELL.stage == START else WORKS[CELL.stage]
    if CELL.deed == MEMORY:
        works = RUNS_OUT.get((CELL.part, CELL.stage), works)
    who, place, method = works
    mine = role()
    if mine == DRIVER:
        watchdog.GRACE_S *= HASTE
        if CELL.part == DRIVER:
            setattr(watchdog, "Guard", lambda _: Guard(SILENT_S))  # noqa: B010
        clocked = functools.partialmethod(Watchdog.__init__, clock=hastened)
        setattr(Watchdog, "__init__", clocked)  # noqa: B010
    if mine == who:
        before(place, method, run_out if CELL.deed == MEMORY else stand)
    if mine == DRIVER and CELL.stage == EVALUATION:
        mark_the_last_evaluation()


install()
