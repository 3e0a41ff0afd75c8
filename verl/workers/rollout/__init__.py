"""Rollout: the engines that sample tokens, and the Ray actor that serves one of them."""

from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.registry import ENGINES, create_engine
from verl.workers.rollout.worker import RolloutWorker

__all__ = ["ENGINES", "RolloutEngine", "RolloutWorker", "create_engine"]
