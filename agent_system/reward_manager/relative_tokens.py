"""Token counts of trajectories relative to the group's successes (Arora and Zanette, 2025)."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from verl.protocol import DataProto


def compute_relative_lengths(
    data: DataProto, rows_by_trajectory: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return ``sigmoid(z)`` for each trajectory, by ``traj_uid``.

    z is the number of sampled tokens minus the mean over the successful trajectories of its group,
    divided by their standard deviation. z is 0 where these have equal lengths, or are fewer than
    two.

        successes with 10 and 30 tokens: mean 20, std 10, so sigmoid(-1) = 0.27, sigmoid(1) = 0.73
    """
    columns = data.non_tensor_batch
    token_counts = {
        trajectory: int(data.batch["response_mask"][list(rows)].sum())
        for trajectory, rows in rows_by_trajectory.items()
    }
    lengths_by_group: dict[str, list[int]] = defaultdict(list)
    for trajectory, rows in rows_by_trajectory.items():
        if columns["won"][rows[0]]:
            lengths_by_group[columns["uid"][rows[0]]].append(token_counts[trajectory])
    relative_lengths: dict[str, float] = {}
    for trajectory, rows in rows_by_trajectory.items():
        lengths = lengths_by_group[columns["uid"][rows[0]]]
        std = float(np.std(lengths)) if lengths else 0.0
        z = (token_counts[trajectory] - float(np.mean(lengths))) / std if std else 0.0
        relative_lengths[trajectory] = 1 / (1 + math.exp(-z))
    return relative_lengths
