"""Check that damaged checkpoints are not loaded, and that the newest valid one is.

Files are truncated ("torn"), deleted, swapped, or have one changed byte ("flipped").
"""

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.helpers.tiny_model import make_tiny_policy
from verl.utils.checkpoint import CheckpointManager

STEPS = (1, 2, 3)  # training steps with a checkpoint


def truncate_file(file: Path, rng: random.Random) -> dict[Path, bytes]:
    """Truncate ``file`` at a random position."""
    original = file.read_bytes()
    file.write_bytes(original[: rng.randrange(len(original))])
    return {file: original}


def flip_byte(file: Path, rng: random.Random) -> dict[Path, bytes]:
    """Change one random byte of ``file``."""
    original = file.read_bytes()
    changed_content = bytearray(original)
    changed_content[rng.randrange(len(original))] ^= rng.randrange(1, 256)
    file.write_bytes(changed_content)
    return {file: original}


def delete_file(file: Path, _rng: random.Random) -> dict[Path, bytes]:
    """Delete ``file``."""
    original = file.read_bytes()
    file.unlink()
    return {file: original}


def swap_files(file: Path, rng: random.Random) -> dict[Path, bytes]:
    """Swap the content of ``file`` with that of a different file of its checkpoint."""
    root = next(parent for parent in file.parents if parent.name.startswith("global_step_"))
    original = file.read_bytes()
    other_file = rng.choice([path for path in list_files(root) if path.read_bytes() != original])
    original_contents = {file: original, other_file: other_file.read_bytes()}
    file.write_bytes(original_contents[other_file])
    other_file.write_bytes(original)
    return original_contents


# Each function returns the original bytes of the files that it damages.
DAMAGE_FUNCTIONS: dict[str, Callable[[Path, random.Random], dict[Path, bytes]]] = {
    "torn": truncate_file,
    "flipped": flip_byte,
    "deleted": delete_file,
    "swapped": swap_files,
}


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
    manager: CheckpointManager, damage_index: int, rng: random.Random
) -> tuple[str, str | None]:
    """Damage the newest checkpoint, and every third time also the second newest.

    Return the kind of damage, and the problem. The problem is None if the newest undamaged
    checkpoint was loaded. The files are restored afterwards.
    """
    newest_first = sorted(STEPS, reverse=True)
    damaged_steps = newest_first[: 2 if damage_index % 3 == 2 else 1]
    fault = list(DAMAGE_FUNCTIONS)[damage_index % len(DAMAGE_FUNCTIONS)]
    original_contents: dict[Path, bytes] = {}
    for step in damaged_steps:
        file = rng.choice(list_files(manager.find_checkpoints()[step]))
        original_contents |= DAMAGE_FUNCTIONS[fault](file, rng)
    loaded_path = manager.find_latest_valid()
    expected_path = manager.root / f"global_step_{newest_first[len(damaged_steps)]}"
    loaded_step = (
        manager.load_state(loaded_path)["global_step"] if loaded_path is not None else None
    )
    for path, data in original_contents.items():
        path.write_bytes(data)
    if loaded_path == expected_path:
        return fault, None
    damaged_paths = ", ".join(str(path.relative_to(manager.root)) for path in original_contents)
    return fault, f"{fault} {damaged_paths}: step {loaded_step} was loaded"


def run(count: int, seed: int) -> int:
    """Damage checkpoints ``count`` times. Return 1 if a wrong checkpoint was ever loaded."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="torn-") as root:
        manager = save_checkpoints(Path(root))
        results = [damage_and_load(manager, number, draw) for number in range(count)]
    problems = [problem for _, problem in results if problem is not None]
    counts = Counter(fault for fault, _ in results)
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    counts_text = ", ".join(f"{number} {fault}" for fault, number in sorted(counts.items()))
    sys.stdout.write(f"{count} times ({counts_text}): {len(problems)} wrong\n")
    return int(bool(problems))
