"""A module of a user's own in which a part of the run is struck: ``STRIKE`` says which and how.

STRIKE=save:kill      the rank 0 of the actor kills itself where it begins to save
"""

import functools
import importlib
import os
import signal
from collections.abc import Callable
from typing import Any

import torch


def run_out() -> None:
    raise torch.OutOfMemoryError("out of memory, says the test")


DEEDS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "run out": run_out,
}
COLLECTOR = "agent_system.multi_turn_rollout.collector_worker:CollectorWorker"
RANK = "verl.workers.actor:ActorWorker"
ENGINE = "verl.workers.rollout.hf:HFEngine"
# Class and method; imported where they are struck, for a job has little time to start.
PLACES = {
    "engine start": (ENGINE, "__init__"),
    "engine play": (ENGINE, "step"),
    "collector play": (COLLECTOR, "collect"),
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
        deed()
        return whole(*args, **kwargs)

    setattr(owner, method, struck)


place, deed = os.environ["STRIKE"].split(":")
strike(*PLACES[place], DEEDS[deed])
