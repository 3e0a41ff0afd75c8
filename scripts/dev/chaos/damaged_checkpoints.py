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

STEPS = (1, 2, 3)  # training steps with a checkpoint


@dataclass(frozen=True)
class Damage:
    """Kind of damage ("torn", "flipped" ...), and the original bytes of the damaged files."""

    fault: str
    original_bytes: dict[Path, bytes]

    def restore_files(self) -> None:
        """Write the original bytes back to all files."""
        for path, data in self.original_bytes.items():
            path.write_bytes(data)


def truncate_file(file: Path, draw: random.Random) -> Damage:
    """Truncate ``file`` at a random position."""
    original = file.read_bytes()
    file.write_bytes(original[: draw.randrange(len(original))])
    return Damage("torn", {file: original})


def flip_byte(file: Path, draw: random.Random) -> Damage:
    """Change one random byte of ``file``."""
    original = file.read_bytes()
    changed = bytearray(original)
    changed[draw.randrange(len(original))] ^= draw.randrange(1, 256)
    file.write_bytes(changed)
    return Damage("flipped", {file: original})


def delete_file(file: Path, _draw: random.Random) -> Damage:
    """Delete ``file``. The returned damage contains its bytes."""
    original = file.read_bytes()
    file.unlink()
    return Damage("deleted", {file: original})


def swap_files(file: Path, draw: random.Random) -> Damage:
    """Swap the content of ``file`` with that of a different file of its checkpoint."""
    root = next(parent for parent in file.parents if parent.name.startswith("global_step_"))
    original = file.read_bytes()
    other_file = draw.choice([path for path in list_files(root) if path.read_bytes() != original])
    original_contents = {file: original, other_file: other_file.read_bytes()}
    file.write_bytes(original_contents[other_file])
    other_file.write_bytes(original)
    return Damage("swapped", original_contents)


DAMAGE_FUNCTIONS: tuple[Callable[[Path, random.Random], Damage], ...] = (
    truncate_file,
    flip_byte,
    delete_file,
    swap_files,
)


def list_files(checkpoint: Path) -> list[Path]:
    """Return all files of ``checkpoint``, sorted."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def save_checkpoints(root: Path) -> CheckpointManager:
    """Save checkpoints of an untrained tiny policy, as a training rank writes them."""
    from verl.config.schema.model import OptimConfig
    from verl.models.loader import load_causal_lm  # imported here, because it loads torch
    from verl.models.policy import PolicyModel
    from verl.workers.engine import TrainEngine
    from verl.workers.engine_state import save_engine

    policy = make_tiny_policy(root / "policy", hidden=32, layers=1)
    engine = TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu", optim=OptimConfig())
    manager = CheckpointManager(root / "checkpoints")

    def write(directory: Path) -> None:
        save_engine(engine, directory / "actor").wait_for_files()

    for step in STEPS:
        manager.save(step, write, {"global_step": step})
    return manager


def damage_and_load(
    manager: CheckpointManager, number: int, draw: random.Random
) -> tuple[str, str | None]:
    """Damage the newest checkpoint, and every third time also the second newest.

    Return the kind of damage, and the problem. The problem is None if the newest undamaged
    checkpoint was loaded. The files are restored afterwards.
    """
    newest_first = sorted(STEPS, reverse=True)
    damaged_steps = newest_first[: 2 if number % 3 == 2 else 1]
    damage_function = DAMAGE_FUNCTIONS[number % len(DAMAGE_FUNCTIONS)]
    damages = []
    for step in damaged_steps:
        file = draw.choice(list_files(manager.find_checkpoints()[step]))
        damages.append(damage_function(file, draw))
    loaded_path = manager.find_latest_valid()
    expected = manager.root / f"global_step_{newest_first[len(damaged_steps)]}"
    loaded = manager.load_state(loaded_path)["global_step"] if loaded_path is not None else None
    paths = damages[0].original_bytes
    damaged_paths = ", ".join(str(path.relative_to(manager.root)) for path in paths)
    for damage in damages:
        damage.restore_files()
    problem = (
        None
        if loaded_path == expected
        else f"{damages[0].fault} {damaged_paths}: step {loaded} was loaded"
    )
    return damages[0].fault, problem


def run(count: int, seed: int) -> int:
    """Damage checkpoints ``count`` times. Return 1 if a wrong checkpoint was ever loaded."""
    root = Path(tempfile.mkdtemp(prefix="torn-"))
    draw = random.Random(seed)
    try:
        manager = save_checkpoints(root)
        results = [damage_and_load(manager, number, draw) for number in range(count)]
    finally:
        shutil.rmtree(root)
    problems = [problem for _, problem in results if problem is not None]
    damage_counts = Counter(damage_kind for damage_kind, _ in results)
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    counts_text = ", ".join(
        f"{number} {damage_kind}" for damage_kind, number in sorted(damage_counts.items())
    )
    sys.stdout.write(f"{count} times ({counts_text}): {len(problems)} wrong\n")
    return int(bool(problems))
