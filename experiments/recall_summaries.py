"""Count the summaries of ``recall`` that contain the code that the task asks for.

    python -m experiments.recall_summaries runs/sweeps/recall/compact_s1/rollouts/*.jsonl

For each file: success, summaries written after the code was shown, and those of them that have it.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.record.report.trajectory_chunks import read_trajectories


def count_summaries(trajectory: Mapping[str, Any]) -> Counter[str]:
    """Return the counts of one trajectory.

    A summary counts as ``shown`` if the row before it showed the code, on a page or in the summary
    of the row before. It counts as ``kept`` if it also contains the code.
    """
    counts = Counter[str](episodes=1, successes=int(bool(trajectory["won"])))
    steps = trajectory["steps"]
    letter = steps[0]["observation"].split()[1]
    visible = ""
    for step in steps:
        visible += f" {step['observation'].removeprefix('page')}"
        if "summary" in step:
            codes = {code for code in visible.split() if code[0] == letter and code[1:].isdigit()}
            summary = step["summary"]["response"]
            counts["summaries"] += 1
            counts["shown"] += bool(codes)
            counts["kept"] += any(code in summary.split() for code in codes)
            visible = summary
    return counts


def main(paths: Sequence[str]) -> None:
    """Print one line per rollout file."""
    for path in paths:
        counts = sum(map(count_summaries, read_trajectories(Path(path))), Counter[str]())
        kept_share = counts["kept"] / max(counts["shown"], 1)
        print(
            f"{path}: success {counts['successes'] / max(counts['episodes'], 1):.3f}, "
            f"{counts['shown']} summaries after the code was shown, {kept_share:.3f} of them have it"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
