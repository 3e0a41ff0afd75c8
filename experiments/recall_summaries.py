"""Count the summaries of ``recall`` that contain the thing that the task needs.

    python -m experiments.recall_summaries runs/sweeps/recall/compact_s1/rollouts/*.jsonl

For each file: success, summaries written after the thing was shown, and those of them that have it.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.record.report.trajectory_chunks import read_trajectories


def count_summaries(trajectory: Mapping[str, Any]) -> Counter[str]:
    """Return the counts of one trajectory.

    A summary counts as ``shown`` if its row shows the thing, on a shelf or in the previous summary.
    It counts as ``kept`` if it also contains the thing with its number.
    """
    counts = Counter[str](episodes=1, successes=int(bool(trajectory["won"])))
    steps = trajectory["steps"]
    thing = steps[0]["observation"].split()[1]
    visible = ""
    for step in steps[1:]:
        visible += f" {step['observation']}"
        if "summary" in step:
            shown = re.search(rf"\b{thing} \d", visible)
            counts["shown"] += shown is not None
            counts["kept"] += shown is not None and shown[0] in step["summary"]["response"]
            visible = step["summary"]["response"]
    return counts


def main(paths: Sequence[str]) -> None:
    """Print one line per rollout file."""
    for path in paths:
        counts = sum(map(count_summaries, read_trajectories(Path(path))), Counter[str]())
        kept_share = counts["kept"] / max(counts["shown"], 1)
        print(
            f"{path}: success {counts['successes'] / max(counts['episodes'], 1):.3f}, "
            f"{counts['shown']} summaries after the thing was shown, {kept_share:.3f} have it"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
