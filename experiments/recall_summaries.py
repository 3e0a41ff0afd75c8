"""Count the summaries of ``recall`` that contain the answer of the task.

    python -m experiments.recall_summaries runs/sweeps/recall/compact_s1/rollouts/*.jsonl

In ``recall`` the agent reads pages of arrows between places, and must answer where one of them
leads. Printed for each file: success rate, number of summaries whose row shows the answer, and the
share of these summaries that contain it.
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

    A summary counts as ``shown`` if its row shows the answer of the task, on a page or in the
    previous summary. It counts as ``kept`` if it also contains the answer.
    """
    counts = Counter[str](episodes=1, successes=int(bool(trajectory["won"])))
    steps = trajectory["steps"]
    start_place = steps[0]["observation"][0]
    answer = ""
    for step in steps:
        arrow = re.search(rf"\b{start_place}>(\w)", step["observation"])
        answer = arrow[1] if arrow else answer
        if "summary" in step and answer:
            contains_answer = step["summary"]["response"].strip().endswith(answer)
            counts["shown"] += 1
            counts["kept"] += contains_answer
            answer = answer if contains_answer else ""
    return counts


def main(paths: Sequence[str]) -> None:
    """Print the success rate and the summary counts of each rollout file."""
    for path in paths:
        counts = sum(map(count_summaries, read_trajectories(Path(path))), Counter[str]())
        share_with_answer = counts["kept"] / max(counts["shown"], 1)
        print(
            f"{path}: success {counts['successes'] / max(counts['episodes'], 1):.3f}, "
            f"{counts['shown']} summaries of rows that show the place, "
            f"{share_with_answer:.3f} have it"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
