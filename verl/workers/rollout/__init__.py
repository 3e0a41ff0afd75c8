"""Rollout: the engines that sample tokens, and the Ray actor that serves one of them.

Importing this loads neither torch nor an engine: an engine's module is imported when
``create_engine`` makes it.
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
