"""Warnings about training steps that learn little or nothing, for example without advantages.

Each kind of warning is logged once, and counted at the end of the run.
"""

import logging
from collections import Counter
from collections.abc import Mapping

import numpy as np

from verl.config.schema import PPOConfig
from verl.protocol import DataProto

logger = logging.getLogger(__name__)
NEARLY_ALL = 0.95
TRUNCATED_TURNS = "rollout/truncated_length"
FULL_ROWS = "rollout/truncated_budget"
WITHOUT_ADVANTAGE = "critic/rows_without_advantage"
EQUAL_GROUPS = "critic/groups_of_equal_returns"


def compute_signal_metrics(batch: DataProto) -> dict[str, float]:
    """Return the share of rows without advantage and the share of groups of equal returns.

    A row has no advantage if its advantages [R] are 0 on all sampled tokens. Groups with one
    trajectory do not count; the second metric is omitted if there are no others.
    """
    sampled = batch.batch["response_mask"].bool()
    has_advantage = ((batch.batch["advantages"] != 0) & sampled).any(-1).float()
    metrics = {WITHOUT_ADVANTAGE: 1.0 - has_advantage.mean().item()}
    returns: dict[tuple[str, str], float] = {}
    fields = batch.non_tensor_batch
    rewards = batch.batch["token_level_rewards"].sum(-1).tolist()
    for uid, trajectory, reward in zip(fields["uid"], fields["traj_uid"], rewards, strict=True):
        key = (str(uid), str(trajectory))
        returns[key] = returns.get(key, 0.0) + reward
    groups: dict[str, list[float]] = {}
    for (uid, _), value in returns.items():
        groups.setdefault(uid, []).append(value)
    ranges = [float(np.ptp(values)) for values in groups.values() if len(values) > 1]
    if ranges:
        metrics[EQUAL_GROUPS] = sum(width == 0 for width in ranges) / len(ranges)
    return metrics


class StepWarnings:
    """Counter of steps that learn little: turns truncated, rows full, or no advantages."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.steps = 0
        self.counts: Counter[str] = Counter()

    def count_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count the kinds of warnings that the metrics of ``step`` cause; log each new kind."""
        self.steps += 1
        for warning_kind, message in self._find_messages(metrics).items():
            self.counts[warning_kind] += 1
            if self.counts[warning_kind] == 1:
                logger.warning("step %d: %s", step, message)

    def close(self) -> None:
        """Log the number of steps with each kind of warning that occurred more than once."""
        for warning_kind, count in self.counts.items():
            if count > 1:
                logger.warning("%s in %d of %d steps", warning_kind, count, self.steps)

    def _find_messages(self, metrics: Mapping[str, float]) -> dict[str, str]:
        messages = {}
        truncated_fraction = metrics.get(TRUNCATED_TURNS, 0.0)
        if truncated_fraction >= NEARLY_ALL:
            message = (
                f"{truncated_fraction:.0%} of the trajectories ended with a truncated turn: raise"
            )
            messages["turns were truncated"] = f"{message} {self._format_turn_limit()}"
        full_row_fraction = metrics.get(FULL_ROWS, 0.0)
        if full_row_fraction >= NEARLY_ALL:
            message = (
                f"{full_row_fraction:.0%} of the trajectories ended because their row was "
                "full: raise"
            )
            messages["rows were full"] = f"{message} {self._format_row_limit()}"
        if metrics.get(WITHOUT_ADVANTAGE) == 1.0:
            messages["no row had an advantage"] = self._explain_no_advantage(metrics)
        return messages

    def _format_turn_limit(self) -> str:
        limit = self.config.env.max_turn_tokens
        response_limit = self.config.data.max_response_length
        response = f"data.max_response_length={response_limit}"
        if limit == response_limit:
            return f"{response}, which is the upper limit of env.max_turn_tokens"
        return f"env.max_turn_tokens={limit}"

    def _format_row_limit(self) -> str:
        data = self.config.data
        if self.config.env.history == "append":
            return f"data.max_response_length={data.max_response_length}"
        return f"data.max_prompt_length={data.max_prompt_length}"

    def _explain_no_advantage(self, metrics: Mapping[str, float]) -> str:
        equal = metrics.get(EQUAL_GROUPS)
        if equal == 1.0:
            why = "all returns of each group were equal, so rewards gave no gradient"
        else:
            why = "no row had an advantage, so rewards gave no gradient"
        size = self.config.env.rollout.n
        batch = self.config.data.train_batch_size
        return (
            f"{why}: raise env.rollout.n={size} or data.train_batch_size={batch}, use tasks that "
            "the policy solves sometimes, or start from a policy that solves these sometimes"
        )
