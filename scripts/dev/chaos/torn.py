"""Check that damaged checkpoints are not loaded, and that the newest valid one is.

Files are truncated ("torn"), deleted, swapped, or have one changed byte ("flipped").
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
    """Kind of a damage, and the previous bytes of the damaged files."""

    deed: str
    before: dict[Path, bytes]

    def undo(self) -> None:
        """Write the previous bytes back to all files."""
        for path, data in self.before.items():
            path.write_bytes(data)


def truncate(file: Path, draw: random.Random) -> Damage:
    """Truncate ``file`` at a random position."""
    whole = file.read_bytes()
    file.write_bytes(whole[: draw.randrange(len(whole))])
    return Damage("torn", {file: whole})


def flip(file: Path, draw: random.Random) -> Damage:
    """Change one random byte of ``file``."""
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[draw.randrange(len(whole))] ^= draw.randrange(1, 256)
    file.write_bytes(changed)
    return Damage("flipped", {file: whole})


def delete(file: Path, _draw: random.Random) -> Damage:
    """Delete ``file``, and return its bytes in the damage."""
    whole = file.read_bytes()
    file.unlink()
    return Damage("deleted", {file: whole})


def swap(file: Path, draw: random.Random) -> Damage:
    """Swap the content of ``file`` with that of a different file of its checkpoint."""
    root = next(parent for parent in file.parents if parent.name.startswith("global_step_"))
    whole = file.read_bytes()
    other = draw.choice([path for path in files_of(root) if path.read_bytes() != whole])
    before = {file: whole, other: other.read_bytes()}
    file.write_bytes(before[other])
    other.write_bytes(whole)
    return Damage("swapped", before)


DEEDS: tuple[Callable[[Path, random.Random], Damage], ...] = (truncate, flip, delete, swap)


def files_of(checkpoint: Path) -> list[Path]:
    """Return all files of ``checkpoint``, sorted."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def save_some(root: Path) -> CheckpointManager:
    """Save checkpoints of an untrained tiny policy, as a training rank writes them."""
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
    """Damage the newest checkpoint, and every third time also the one before it.

    Return the kind of damage, and the problem or None. The files are restored afterwards.
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
    """Damage checkpoints ``count`` times. Return 1 if a wrong checkpoint was loaded once."""
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
