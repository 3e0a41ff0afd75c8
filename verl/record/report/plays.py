"""The plays that a page holds: one packed chunk per rollout file, and an index of all of them.

    rollouts/<step>.jsonl ──pack()──▶ summary: outcome, return, group of every play ──▶ index
                                 └──▶ chunk: turns and tokens, gzip of JSON

A page reads the index when it opens, and a chunk when somebody looks at one of its plays.
"""

import base64
import functools
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.record.report.episodes import asked_of_step, contrasting, read_trajectories, step_views
from verl.record.run_dir import RunDirectory
from verl.report_sections import Outcomes, StepView
from verl.utils import jsonl

BUDGET = 80_000_000  # bytes of rollout files that one page is made of; some 15 pack into one
LARGEST = 24_000_000  # of one file: of a larger one its beginning
DIGITS = 4  # of a token's numbers
KEPT = ("step", "observation", "action", "reward", "advantage")


KINDS = ("train", "val", "audit")
AUDIT = "audit"  # of a run, in its directory: plays whose steps were returned to
Tokens = Mapping[tuple[str, int], Mapping[str, Any]]  # by trajectory and step


@dataclass(frozen=True)
class PlayFile:
    """A rollout file; ``kind`` is ``train``, ``val`` or ``audit``, ``tokens`` where the numbers of
    its tokens may be.
    """

    path: Path
    kind: str
    step: int
    tokens: Path | None = None

    @property
    def name(self) -> str:
        """What the page calls it."""
        return f"{self.kind}-{self.step}"

    @property
    def cost(self) -> int:
        """Bytes that are read of it."""
        return min(self.path.stat().st_size, LARGEST)


@dataclass(frozen=True)
class Chunk:
    """What the index says of the plays of a file, and these plays, packed."""

    summary: dict[str, Any]
    packed: bytes


def play_files(directory: RunDirectory) -> list[PlayFile]:
    """All rollout files, in the order of their steps, those of a validation last in its step; with
    those of the run's audit.
    """
    audit = RunDirectory(directory.path / AUDIT)
    files = [
        *_of_kind(directory, "train"),
        *_of_kind(directory, "val"),
        *_of_kind(audit, AUDIT),
    ]
    return sorted(files, key=_order)


def _of_kind(directory: RunDirectory, kind: str) -> list[PlayFile]:
    is_val = kind == "val"
    return [
        PlayFile(
            directory.rollout_path(step, is_val),
            kind,
            step,
            None if is_val else directory.token_path(step),
        )
        for step in directory.rollout_steps(is_val)
    ]


def _order(file: PlayFile) -> tuple[int, int]:
    return file.step, KINDS.index(file.kind)


def affordable(files: Sequence[PlayFile], budget: int = BUDGET) -> list[PlayFile]:
    """Of ``files`` as many as fit into ``budget`` bytes: all, or of each kind every second, fourth
    and so on, and the last.
    """
    kept = list(files)
    stride = 1
    while sum(file.cost for file in kept) > budget and stride < len(files):
        stride *= 2
        kept = [file for kind in KINDS for file in _every(files, kind, stride)]
    return sorted(kept, key=_order)


def _every(files: Sequence[PlayFile], kind: str, stride: int) -> list[PlayFile]:
    own = [file for file in files if file.kind == kind]
    # Counted from the first: as a run grows its page keeps the files that it has packed already.
    return [file for n, file in enumerate(own) if n % stride == 0 or n == len(own) - 1]


def pack(file: PlayFile) -> Chunk:
    """The chunk of ``file``; made once for every state of the file."""
    status = file.path.stat()
    return _pack(file, tuple(step_views()), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _pack(file: PlayFile, views: tuple[StepView, ...], size: int, _time: int) -> Chunk:
    rows = read_trajectories(file.path, LARGEST)
    known = Known(views, _read_tokens(file.tokens) if file.tokens else {}, _outcomes(file, views))
    plays = [_play(row, known) for row in rows]
    summary = _summary(rows, file) | {"whole": size <= LARGEST}
    returned_to = {name for outcomes in known.outcomes.values() for name, _ in outcomes}
    if returned_to:
        summary["audited"] = [int(play["name"] in returned_to) for play in plays]
    return Chunk(summary, packed({"plays": plays}))


@dataclass(frozen=True)
class Known:
    """What is known of steps beside their record: what ``views`` ask for, the numbers of their
    tokens, and, by the key of alternatives, what plays earned that went on with these.
    """

    views: Sequence[StepView]
    tokens: Tokens
    outcomes: Mapping[str, Outcomes]


def _outcomes(file: PlayFile, views: Sequence[StepView]) -> dict[str, Outcomes]:
    asked = [view.alternatives for view in views if view.alternatives is not None]
    run_dir = file.path.parent.parent
    return {view.key: view.outcomes(run_dir) for view in asked if view.outcomes is not None}


def _read_tokens(path: Path) -> Tokens:
    return {
        (str(line["traj_uid"]), step["step"]): step
        for line in jsonl.read(path, LARGEST)
        for step in line["steps"]
    }


def _summary(rows: Sequence[dict[str, Any]], file: PlayFile) -> dict[str, Any]:
    groups: dict[str, int] = {}
    tasks = []
    numbers = []
    for row in rows:
        uid = str(row.get("uid"))
        if uid not in groups:
            groups[uid] = len(groups)
            tasks.append(str(row.get("task_id")))
        numbers.append(groups[uid])
    return {
        "name": file.name,
        "kind": file.kind,
        "step": file.step,
        "tasks": tasks,
        "group": numbers,
        "won": [int(bool(row.get("won"))) for row in rows],
        "return": [_short(row.get("return")) for row in rows],
        "turns": [len(row["steps"]) for row in rows],
        "tokens": [sum(step.get("num_tokens") or 0 for step in row["steps"]) for row in rows],
        "pair": [rows.index(row) for row in contrasting(rows)],
    }


def _play(row: Mapping[str, Any], known: Known) -> dict[str, Any]:
    name = str(row.get("traj_uid"))
    return {
        "name": name,
        "prompt": row.get("prompt", ""),
        "aborted": bool(row.get("aborted")),
        "steps": [_step(step, (name, step.get("step", 0)), known) for step in row["steps"]],
    }


def _step(step: Mapping[str, Any], place: tuple[str, int], known: Known) -> dict[str, Any]:
    found = {key: step[key] for key in KEPT if step.get(key) is not None}
    earned = {key: outcomes.get(place, {}) for key, outcomes in known.outcomes.items()}
    found |= asked_of_step(step, known.views, earned)
    found |= _coloured(step, known.tokens.get(place, {}))
    if not step.get("is_action_valid", True):
        found["invalid"] = True
    if step.get("stop_reason") == "length":
        found["cut"] = True
    return found


def _coloured(step: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of a step with the numbers they are coloured by; its answer where it has none.

    ``told`` is what the file of the tokens says of the step.
    """
    state = {"state": told["state"]} if "state" in told else {}
    pairs = step.get("token_credit") or []
    if not pairs:
        return state | {"response": step.get("response", "")}
    credit = [_short(value) for _, value in pairs]
    mask = told.get("mask", [])
    # Credit is of sampled tokens alone; a file that was torn knows others.
    if sum(mask) != len(credit):
        return state | {"tokens": [text for text, _ in pairs], "overlays": {"advantage": credit}}
    left = iter(credit)
    overlays = {"advantage": [next(left) if sampled else None for sampled in mask]}
    # Coarser than the file: it is a colour, and half of a page would be digits of noise.
    if "entropy" in told:
        overlays["entropy"] = [round(value or 0.0, 2) for value in told["entropy"]]
    if "gap" in told:
        overlays["gap"] = [gap and float(f"{gap:.1g}") for gap in told["gap"]]
    overlays["mask"] = told.get("weight", mask)
    return state | {"tokens": told["tokens"], "overlays": overlays}


def _short(value: float | None) -> float:
    # null in the file where it was not finite
    return round(value or 0.0, DIGITS)


def packed(value: object) -> bytes:
    """``value`` as gzip of JSON; the same value gives the same bytes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(), 6, mtime=0)


def embedded(data: bytes) -> str:
    """Text that an element of the page can hold."""
    return base64.b64encode(data).decode("ascii")


def index(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """What a page knows of its plays before it reads a chunk."""
    return {
        "files": [chunk.summary for chunk in chunks],
        "lead": " ".join(view.lead for view in step_views() if view.lead),
    }
