"""Rollouts: the collector, its workers, and the packing of trajectories into rows."""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
    __name__, {"CollectorWorker": "collector_worker", "TrajectoryCollector": "rollout_loop"}
)
