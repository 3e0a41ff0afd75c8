"""Rollouts: the collector, its workers, and the packing of trajectories into rows."""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "CollectorWorker": "collector_worker",
        "TrajectoryCollector": "rollout_loop",
    },
)
