"""A module of a user's own in which a part of the run is struck: ``STRIKE`` says which and how.

    STRIKE="rank save:stop"     a rank stops itself where it begins to save
    STRUCK=FILE                 there from then on

How fast a machine starts Ray must not decide a test: the watchdog's clock is the usual one until a
part was struck, and then runs ``HASTE`` times as fast.
"""

import functools
import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.utils import watchdog
from verl.utils.watchdog import Watchdog

STRUCK = Path(os.environ["STRUCK"])
HASTE = 50


def hastened() -> float:
    """Seconds, for the watchdog."""
    now = time.monotonic()
    return now + HASTE * (time.time() - STRUCK.stat().st_mtime) if STRUCK.exists() else now


DEEDS: dict[str, Callable[[], object]] = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
RANK = "verl.workers.actor:ActorWorker"
ENGINE = "verl.workers.rollout.hf:HFEngine"
# Class and method; imported where they are struck, for a job has little time to start.
PLACES = {
    "engine play": (ENGINE, "step"),
    "rank update": (RANK, "update_actor"),
    "rank save": (RANK, "save_checkpoint"),
}


def strike(place: str, method: str, deed: Callable[[], object]) -> None:
    """Have ``deed`` done before ``method`` of the class at ``place``."""
    module, name = place.split(":")
    owner: Any = getattr(importlib.import_module(module), name)
    whole = getattr(owner, method)

    @functools.wraps(whole)
    def struck(*args: Any, **kwargs: Any) -> Any:
        STRUCK.touch()
        deed()
        return whole(*args, **kwargs)

    setattr(owner, method, struck)


watchdog.GRACE_S *= HASTE
setattr(Watchdog, "__init__", functools.partialmethod(Watchdog.__init__, clock=hastened))  # noqa: B010
place, deed = os.environ["STRIKE"].split(":")
strike(*PLACES[place], DEEDS[deed])
