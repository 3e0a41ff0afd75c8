"""Who plays a batch: the workers, whose engines rest as soon as its last play is over."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.credit import compares_with_greedy_play
from verl.trainer.ppo.interfaces import RolloutGroup, Workers


@dataclass(frozen=True)
class RestingEngines:
    """``workers``, whose engines give their memory to the training groups before rows are scored: a
    collector plays all that it plays before that.
    """

    workers: Workers

    @property
    def rollout_workers(self) -> Sequence[Any]:
        """The engines."""
        return self.workers.rollout_workers

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Score rows while the engines sleep."""
        self.workers.sleep_engines()
        return self.workers.compute_log_prob(data)


def players(workers: Workers, config: PPOConfig) -> RolloutGroup:
    """``workers`` for one batch; where something else is played after it was scored, their engines
    stay awake.
    """
    overlaps = config.trainer.rollout_overlap == "one_step"
    return workers if overlaps or compares_with_greedy_play(config) else RestingEngines(workers)
