"""Playing trajectories: the collector, its workers, and the packing of what was played into rows."""

__all__ = ["CollectorWorker", "TrajectoryCollector"]


def __getattr__(name: str):
    if name == "TrajectoryCollector":
        from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector

        return TrajectoryCollector
    if name == "CollectorWorker":
        from agent_system.multi_turn_rollout.collector_worker import CollectorWorker

        return CollectorWorker
    raise AttributeError(f"module 'agent_system.multi_turn_rollout' has no attribute {name!r}")
