"""Rollout engines that sample tokens, and the Ray actor that serves one of them.

Importing this package loads neither torch nor an engine. ``create_engine`` imports the module of
the engine that it creates.
"""

from verl.workers.rollout.base import EngineError, RolloutEngine
from verl.workers.rollout.engine_registry import ENGINES, create_engine, register_engine
from verl.workers.rollout.worker import RolloutWorker

__all__ = [
    "ENGINES",
    "EngineError",
    "RolloutEngine",
    "RolloutWorker",
    "create_engine",
    "register_engine",
]
