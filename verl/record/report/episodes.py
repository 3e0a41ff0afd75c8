"""Sample episodes of a report: which ones, and their turns in the form the page shows."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from verl.record.report.run_data import RunData
from verl.utils import jsonl

MAX_LINES = 4000  # rows read of one rollout file
MAX_TURNS = 60


@dataclass
class EpisodeView:
    """One trajectory: the rows that belong to it, merged, with its turns in order."""

    title: str
    row: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(step.get("num_tokens") or 0 for step in self.steps)

    @property
    def has_credit(self) -> bool:
        """Whether the tokens carry advantages."""
        return any("token_credit" in step for step in self.steps)

    @property
    def scale(self) -> float:
        """The advantage (absolute) at which colours are full: 95% of the tokens lie below it."""
        sizes = sorted(
            abs(value or 0.0) for step in self.steps for _, value in step.get("token_credit", [])
        )
        return max(sizes[int(0.95 * (len(sizes) - 1))], 1e-9) if sizes else 1.0

    def turns(self) -> list[dict[str, Any]]:
        """The steps with what the template needs beside the record: credit strength and the four
        thoughts.
        """
        scale = self.scale
        return [_turn(step, scale) for step in self.steps[:MAX_TURNS]]


def _turn(step: dict[str, Any], scale: float) -> dict[str, Any]:
    tokens = [
        {
            "text": text,
            "value": value,
            "strength": round(math.copysign(min(1.0, abs(value) / scale), value), 2),
        }
        for text, value in ((text, value or 0.0) for text, value in step.get("token_credit", []))
    ]
    contexts = sorted(step.get("contexts") or [], key=lambda context: context["level"])
    scores = [c["score_logprob"] for c in contexts if c.get("score_logprob") is not None]
    best = max(scores, default=None)
    thoughts = [{**c, "best": c.get("score_logprob") == best and len(scores) > 1} for c in contexts]
    return {**step, "tokens": tokens, "thoughts": thoughts}


def read_trajectories(path: Any) -> list[dict[str, Any]]:
    """The trajectories of a rollout file: rows of the same ``traj_uid`` are merged, steps in order."""
    merged: dict[str, dict[str, Any]] = {}
    for count, line in enumerate(jsonl.read(path)):
        if count >= MAX_LINES:
            break
        known = merged.setdefault(str(line.get("traj_uid", count)), {**line, "steps": []})
        known["steps"] = known["steps"] + list(line.get("steps") or [])
    for trajectory in merged.values():
        trajectory["steps"].sort(key=lambda step: step.get("step", 0))
    return list(merged.values())


def sample_episodes(run: RunData) -> list[EpisodeView]:
    """A won and a lost play of the same task from the last training step, one early episode, two
    held-out ones.
    """
    chosen: list[EpisodeView] = []
    train, val = run.rollout_steps(), run.rollout_steps(validation=True)
    if train:
        last = read_trajectories(run.directory.rollout_path(train[-1]))
        chosen += [_episode(f"training step {train[-1]}", row) for row in contrasting(last)]
    if val:
        held_out = read_trajectories(run.directory.rollout_path(val[-1], validation=True))
        chosen += [_episode(f"held-out, step {val[-1]}", row) for row in one_of_each(held_out)]
    if len(train) > 1:
        early = one_of_each(read_trajectories(run.directory.rollout_path(train[0])))
        chosen += [_episode(f"training step {train[0]}", row) for row in early[:1]]
    return chosen


def _episode(title: str, row: dict[str, Any]) -> EpisodeView:
    return EpisodeView(title, row, row["steps"])


def contrasting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A won and a lost row of the same group where there is one, any of each otherwise; short ones
    first.
    """
    groups = defaultdict(list)
    for row in sorted(rows, key=lambda row: len(row["steps"])):
        groups[row.get("uid")].append(row)
    for members in groups.values():
        if len({bool(row.get("won")) for row in members}) == 2:
            return one_of_each(members)
    return one_of_each(rows)


def one_of_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first won and the first lost row that have steps."""
    usable = [row for row in rows if row["steps"] and not row.get("aborted")]
    picked = [
        next((row for row in usable if bool(row.get("won")) is won), None) for won in (True, False)
    ]
    return [row for row in picked if row is not None]
