"""Write data files with questions such as "Which number is larger: 31 or 45?".

    python scripts/write_number_questions.py [--out data/numbers]

``train.jsonl`` has 4,000 questions and ``test.jsonl`` 256 others, in the format of
``docs/train_on_data.md``. ``configs/smollm2_numbers.yaml`` trains on them.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.utils.commands import run_and_report_mistakes
from verl.utils.files import atomic_write, require_new_file

SEED = 0  # of the order of the questions
SPLIT_SIZES = {"train": 4000, "test": 256}
NUMBERS = range(10, 100)
EXAMPLES = ((31, 45), (82, 29))  # answered questions at the start of every prompt


def make_question(first: int, second: int) -> str:
    """Return the text of the question which of two numbers is larger."""
    return f"Which number is larger: {first} or {second}?"


def make_row(first: int, second: int) -> dict[str, Any]:
    """Return a row of a data file: prompt messages, data source and ground truth.

    The prompt has two answered examples, and then the question about ``first`` and ``second``.
    """
    messages: list[dict[str, str]] = []
    for pair in EXAMPLES:
        messages.append({"role": "user", "content": make_question(*pair)})
        messages.append({"role": "assistant", "content": str(max(pair))})
    messages.append({"role": "user", "content": make_question(first, second)})
    return {
        "prompt": messages,
        "data_source": "larger_number",
        "reward_model": {"ground_truth": str(max(first, second))},
    }


def make_questions() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the splits train and test. No question occurs twice."""
    pairs = [pair for pair in permutations(NUMBERS, 2) if pair not in EXAMPLES]
    random.Random(SEED).shuffle(pairs)
    rows = (make_row(*pair) for pair in pairs)
    return {split: [next(rows) for _ in range(num_rows)] for split, num_rows in SPLIT_SIZES.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/numbers"), help="directory")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    args = parser.parse_args(argv)
    files = {split: args.out / f"{split}.jsonl" for split in SPLIT_SIZES}
    for file in files.values():
        require_new_file(file, "--out", args.overwrite, "--overwrite")
    args.out.mkdir(parents=True, exist_ok=True)
    for split, rows in make_questions().items():
        with atomic_write(files[split]) as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{args.out}: {', '.join(f'{size} {split}' for split, size in SPLIT_SIZES.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
