"""Checkpoint files that are torn, flipped, deleted or swapped: none is loaded, the newest whole
checkpoint is.
"""

import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.tiny_model import make_tiny_policy
from verl.utils.checkpoint import CheckpointManager

STEPS = (1, 2, 3)


@dataclass(frozen=True)
class Damage:
    """What was done to which files, and their bytes before."""

    deed: str
    before: dict[Path, bytes]

    def undo(self) -> None:
        """Make the files whole again."""
        for path, data in self.before.items():
            path.write_bytes(data)


def truncate(file: Path, draw: random.Random) -> Damage:
    """Cut ``file`` off somewhere."""
    whole = file.read_bytes()
    file.write_bytes(whole[: draw.randrange(len(whole))])
    return Damage("torn", {file: whole})


def flip(file: Path, draw: random.Random) -> Damage:
    """Change one byte of ``file``."""
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[draw.randrange(len(whole))] ^= draw.randrange(1, 256)
    file.write_bytes(changed)
    return Damage("flipped", {file: whole})


def delete(file: Path, _draw: random.Random) -> Damage:
    """Remove ``file``."""
    whole = file.read_bytes()
    file.unlink()
    return Damage("deleted", {file: whole})


def swap(file: Path, draw: random.Random) -> Damage:
    """Exchange ``file`` and another of its checkpoint that holds something else."""
    root = next(parent for parent in file.parents if parent.name.startswith("global_step_"))
    whole = file.read_bytes()
    other = draw.choice([path for path in files_of(root) if path.read_bytes() != whole])
    before = {file: whole, other: other.read_bytes()}
    file.write_bytes(before[other])
    other.write_bytes(whole)
    return Damage("swapped", before)


DEEDS: tuple[Callable[[Path, random.Random], Damage], ...] = (truncate, flip, delete, swap)


def files_of(checkpoint: Path) -> list[Path]:
    """All files of ``checkpoint``, in an order that is the same everywhere."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def save_some(root: Path) -> CheckpointManager:
    """Checkpoints of a tiny policy that learns nothing, as a training rank writes them."""
    from verl.config.schema.model import OptimConfig
    from verl.models.loader import load_causal_lm  # loads torch, which no other command needs here
    from verl.models.policy import PolicyModel
    from verl.workers.engine import TrainEngine
    from verl.workers.engine_state import save_engine

    policy = make_tiny_policy(root / "policy", hidden=32, layers=1)
    engine = TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu", optim=OptimConfig())
    manager = CheckpointManager(root / "checkpoints")

    def write(directory: Path) -> None:
        save_engine(engine, directory / "actor").files()

    for step in STEPS:
        manager.save(step, write, {"global_step": step})
    return manager


def strike(manager: CheckpointManager, number: int, draw: random.Random) -> tuple[str, str | None]:
    """Damage the newest checkpoint, every third time the one before it as well; what was done, and
    what went wrong.
    """
    newest_first = sorted(STEPS, reverse=True)
    struck = newest_first[: 2 if number % 3 == 2 else 1]
    deed = DEEDS[number % len(DEEDS)]
    done = []
    for step in struck:
        file = draw.choice(files_of(manager.steps()[step]))
        done.append(deed(file, draw))
    found = manager.latest_valid()
    expected = manager.root / f"global_step_{newest_first[len(struck)]}"
    loaded = manager.load_state(found)["global_step"] if found is not None else None
    places = ", ".join(str(path.relative_to(manager.root)) for path in done[0].before)
    for damage in done:
        damage.undo()
    wrong = None if found == expected else f"{done[0].deed} {places}: step {loaded} was loaded"
    return done[0].deed, wrong


def run(count: int, seed: int) -> int:
    """Damage ``count`` times; 1 where anything but the newest whole checkpoint was loaded."""
    root = Path(tempfile.mkdtemp(prefix="torn-"))
    draw = random.Random(seed)
    try:
        manager = save_some(root)
        answers = [strike(manager, number, draw) for number in range(count)]
    finally:
        shutil.rmtree(root)
    wrong = [why for _, why in answers if why is not None]
    done = Counter(deed for deed, _ in answers)
    sys.stdout.writelines(f"{why}\n" for why in wrong)
    shown = ", ".join(f"{number} {deed}" for deed, number in sorted(done.items()))
    sys.stdout.write(f"{count} times ({shown}): {len(wrong)} wrong\n")
    return int(bool(wrong))
