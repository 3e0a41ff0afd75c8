"""Warnings about steps from which little can be learned, once per kind and with their number."""

import logging
from collections import Counter
from collections.abc import Mapping

import numpy as np

from verl.config.schema import PPOConfig
from verl.protocol import DataProto

logger = logging.getLogger(__name__)
NEARLY_ALL = 0.95
CUT = "rollout/truncated_length"
FULL = "rollout/truncated_budget"
WITHOUT_ADVANTAGE = "critic/rows_without_advantage"
EQUAL_GROUPS = "critic/groups_of_equal_returns"


def signal_metrics(batch: DataProto) -> dict[str, float]:
    """Shares of what teaches nothing: of rows whose advantages [B, R] are all 0, and of groups of
    two trajectories or more whose returns are all equal, nothing where there is no such group.
    """
    sampled = batch.batch["response_mask"].bool()
    moved = ((batch.batch["advantages"] != 0) & sampled).any(-1).float()
    metrics = {WITHOUT_ADVANTAGE: 1.0 - moved.mean().item()}
    earned: dict[tuple[str, str], float] = {}
    fields = batch.non_tensor_batch
    rewards = batch.batch["token_level_rewards"].sum(-1).tolist()
    for uid, trajectory, reward in zip(fields["uid"], fields["traj_uid"], rewards, strict=True):
        place = (str(uid), str(trajectory))
        earned[place] = earned.get(place, 0.0) + reward
    groups: dict[str, list[float]] = {}
    for (uid, _), value in earned.items():
        groups.setdefault(uid, []).append(value)
    spreads = [float(np.ptp(values)) for values in groups.values() if len(values) > 1]
    if spreads:
        metrics[EQUAL_GROUPS] = sum(spread == 0 for spread in spreads) / len(spreads)
    return metrics


class StepWarnings:
    """Counts the steps of each kind; the first of a kind is a warning, and so is their number when
    training ends.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.steps = 0
        self.counts: Counter[str] = Counter()

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of what the metrics of ``step`` say for the first time."""
        self.steps += 1
        for kind, message in self._kinds(metrics).items():
            self.counts[kind] += 1
            if self.counts[kind] == 1:
                logger.warning("step %d: %s", step, message)

    def close(self) -> None:
        """Say how many steps there were of each kind that came more than once."""
        for kind, count in self.counts.items():
            if count > 1:
                logger.warning("%s in %d of %d steps", kind, count, self.steps)

    def _kinds(self, metrics: Mapping[str, float]) -> dict[str, str]:
        found = {}
        cut = metrics.get(CUT, 0.0)
        if cut >= NEARLY_ALL:
            message = f"{cut:.0%} of the trajectories ended with a turn that was cut: raise"
            found["turns were cut"] = f"{message} {self._turn_limit()}"
        full = metrics.get(FULL, 0.0)
        if full >= NEARLY_ALL:
            message = f"{full:.0%} of the trajectories ended because their row was full: raise"
            found["rows were full"] = f"{message} {self._row_limit()}"
        if metrics.get(WITHOUT_ADVANTAGE) == 1.0:
            found["no row had an advantage"] = self._nothing_learned(metrics)
        return found

    def _turn_limit(self) -> str:
        limit = self.config.env.max_turn_tokens
        longest = self.config.data.max_response_length
        response = f"data.max_response_length={longest}"
        if limit == longest:
            return f"{response}, of which env.max_turn_tokens is not more"
        return f"env.max_turn_tokens={limit}"

    def _row_limit(self) -> str:
        data = self.config.data
        if self.config.env.history == "append":
            return f"data.max_response_length={data.max_response_length}"
        return f"data.max_prompt_length={data.max_prompt_length}"

    def _nothing_learned(self, metrics: Mapping[str, float]) -> str:
        equal = metrics.get(EQUAL_GROUPS)
        if equal == 1.0:
            why = "no group had two different returns, and nothing was learned from its rewards"
        else:
            why = "no row had an advantage, and nothing was learned from rewards"
        size = self.config.env.rollout.n
        batch = self.config.data.train_batch_size
        return (
            f"{why}: raise env.rollout.n={size} or data.train_batch_size={batch}, take tasks that "
            "the policy solves at times, or start from a policy that does"
        )
