"""A module of a user's own, imported by the processes of a job that is to be struck.

    CHAOS_CELL=engine/mid-play/killed
    CHAOS_FOLDER     `reached`: the job stands at the stage; `struck`: done, it may go on;
                     `last`: the last evaluation has begun

Where a part is killed or hung, the process that works at that stage stands in its method until the
harness has sent the signal. Where a part is out of memory, a method of it asks for more than there
is, from then on every time.

How fast a machine starts Ray must not decide anything: the watchdog's clock is the usual one until
a part was struck, and then runs faster.
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
PATIENCE_S = 60.0  # for the harness to strike
SILENT_S = 30.0  # for which a driver may be silent that is to be struck
# The call with which a stage begins: mid-play is not the first step, and an engine gets weights
# once before anything is trained.
FROM_CALL = {(ENGINE, PLAY): 3, (ENVIRONMENT, PLAY): 3, (COLLECTOR, PLAY): 2, (ENGINE, UPDATE): 2}
# A worker that hangs is replaced within seconds, and Ray gives a node up within a minute: neither
# is a stall.
HASTE = {ENVIRONMENT: 15, NODE: 5}.get(CELL.part, 60)

ENGINE_CLASS = "verl.workers.rollout.hf:HFEngine"
RANK_CLASS = "verl.workers.actor:ActorWorker"
TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
PLAYER = "agent_system.multi_turn_rollout.collector_worker:CollectorWorker"
# Ray keeps methods of an actor's own class as they were before anybody changed them.
PLAY_OF_ONE = "agent_system.multi_turn_rollout.trajectory_player:TrajectoryPlayer"
POOL = "agent_system.environments.pool.environment_pool:EnvironmentPool"
LINE = "agent_system.environments.env_package.number_line.package:NumberLineEnv"

# Who works at a stage: the role of its process, class and method.
WORKS = {
    START: (RANK, "verl.workers.engine:TrainEngine", "__init__"),
    PLAY: (ENGINE, ENGINE_CLASS, "step"),
    UPDATE: (RANK, RANK_CLASS, "update_actor"),
    SAVE: (RANK, RANK_CLASS, "save_checkpoint"),
    EVALUATION: (ENGINE, ENGINE_CLASS, "step"),
}
# These start later than the others.
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
    """What this process is in the job."""
    name = getattr(sys.modules["__main__"].__spec__, "name", "")
    if name == "verl.trainer.main_ppo":
        return DRIVER
    if name == "agent_system.environments.pool.worker":
        return ENVIRONMENT
    if "RANK" in os.environ:
        return RANK
    # Ray has imported the module of the class that it made here.
    return COLLECTOR if PLAYER.partition(":")[0] in sys.modules else ENGINE


def hastened() -> float:
    """Seconds, for the watchdog."""
    now = time.monotonic()
    return now + HASTE * (time.time() - STRUCK.stat().st_mtime) if STRUCK.exists() else now


def stand() -> None:
    """Say that the stage is reached, and stand until the part was struck."""
    if STRUCK.exists():
        return
    REACHED.touch()
    deadline = time.monotonic() + PATIENCE_S
    while not STRUCK.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def run_out() -> None:
    """Ask for more memory than there is, as this kind of process does."""
    STRUCK.touch()
    if CELL.part in (ENGINE, RANK):
        import torch  # loaded there already; an environment worker starts without it

        torch.empty(1 << 50)
    bytearray(1 << 60)


def before(place: str, method: str, deed: Callable[[], object]) -> None:
    """Have ``deed`` done before ``method`` of the class at ``place``, from the stage on."""
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

    # Ray asks which methods are coroutines before it calls them.
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
    """Have the driver make ``LAST`` where it begins."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    validate = RayPPOTrainer.validate

    def marked(self: RayPPOTrainer[Any]) -> Any:
        if self.global_step >= self.total_steps:
            LAST.touch()
        return validate(self)

    RayPPOTrainer.validate = marked


def install() -> None:
    """Prepare this process for what is to happen to it."""
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
