"""Write the trajectories of a run as one Parquet file for notebooks, a row per turn or summary.

python scripts/export_plays.py runs/rlvcr/quickstart plays.parquet

``pandas.read_parquet("plays.parquet").query("not won").groupby("task_id").action.agg(list)``
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.records import SUMMARY
from verl.utils import jsonl
from verl.utils.commands import UsageError, convert_read_errors, run_and_report_mistakes
from verl.utils.files import replace_atomically, require_new_file
from verl.utils.logging import setup_logging
from verl.utils.progress import Progress

TEXT_TYPE, FLOAT_TYPE = pyarrow.string(), pyarrow.float64()
INTEGER_TYPE, BOOLEAN_TYPE = pyarrow.int64(), pyarrow.bool_()
TRAJECTORY_COLUMNS = {
    "uid": TEXT_TYPE,
    "traj_uid": TEXT_TYPE,
    "task_id": TEXT_TYPE,
    "data_source": TEXT_TYPE,
    "won": BOOLEAN_TYPE,
    "return": FLOAT_TYPE,
    "length": INTEGER_TYPE,
    "aborted": BOOLEAN_TYPE,
    "prompt": TEXT_TYPE,
}
TURN_COLUMNS = {
    "step": INTEGER_TYPE,
    "is_summary": BOOLEAN_TYPE,
    "observation": TEXT_TYPE,
    "response": TEXT_TYPE,
    "action": TEXT_TYPE,
    "is_action_valid": BOOLEAN_TYPE,
    "reward": FLOAT_TYPE,
    "done": BOOLEAN_TYPE,
    "num_tokens": INTEGER_TYPE,
    "stop_reason": TEXT_TYPE,
    "level": INTEGER_TYPE,
    "advantage": FLOAT_TYPE,
}
CREDIT_COLUMNS = {"tokens": pyarrow.list_(TEXT_TYPE), "token_advantages": pyarrow.list_(FLOAT_TYPE)}
# `split`: "train" or "val"; `iteration`: training step; `more`: all further fields of a turn, as
# JSON.
SCHEMA = pyarrow.schema(
    {
        "split": TEXT_TYPE,
        "iteration": INTEGER_TYPE,
        **TRAJECTORY_COLUMNS,
        **TURN_COLUMNS,
        **CREDIT_COLUMNS,
        "more": TEXT_TYPE,
    }
)


def iter_turn_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for every turn and summary of a rollout file (``12.jsonl``, ``val_12.jsonl``).

    A summary is written by the policy before turn ``step``, when a row is full (``env.compact``).
    """
    split, _, step_number = file.stem.rpartition("_")
    file_columns = {"split": split or "train", "iteration": int(step_number)}
    for line in jsonl.read(file):
        trajectory_values = {name: line.get(name) for name in TRAJECTORY_COLUMNS}
        records = [{**step, "is_summary": False} for step in line["steps"]]
        if line.get(SUMMARY):
            records.append({**line[SUMMARY], "is_summary": True})
        for record in records:
            token_credit = record.get("token_credit") or []
            turn_fields = {*TURN_COLUMNS, "token_credit"}
            other_values = {key: record[key] for key in record if key not in turn_fields}
            yield {
                **file_columns,
                **trajectory_values,
                **{name: record.get(name) for name in TURN_COLUMNS},
                "tokens": [text for text, _ in token_credit],
                "token_advantages": [value for _, value in token_credit],
                "more": json.dumps(other_values),
            }


def export_trajectories(run: Path, out: Path) -> int:
    """Write turns and summaries of all rollout files of ``run`` to the Parquet file ``out``.

    Return the number of its rows. Raises ``UsageError`` for a run without rollout files.
    """
    rollout_files = [
        path
        for path in (run / "rollouts").glob("*.jsonl")
        if path.stem.removeprefix("val_").isdecimal()
    ]
    if not rollout_files:
        raise UsageError(
            f"{run}/rollouts: it contains no trajectories; fix: name a run directory", "no_rows"
        )
    rollout_files.sort(key=lambda path: (int(path.stem.rpartition("_")[2]), path.stem))
    num_rows = 0
    with (
        replace_atomically(out) as partial_path,
        pyarrow.parquet.ParquetWriter(partial_path, SCHEMA, compression="zstd") as writer,
        Progress("trajectories", len(rollout_files), "files") as progress,
    ):
        for file in rollout_files:
            with convert_read_errors(file):
                rows = list(iter_turn_rows(file))
                table = pyarrow.Table.from_pylist(rows, SCHEMA)
            writer.write_table(table)
            num_rows += len(rows)
            progress.add_done()
    return num_rows


def main(argv: Sequence[str] | None = None) -> None:
    """Export the run that the command line names."""
    parser = argparse.ArgumentParser(
        description="Write the trajectories of a run as Parquet, a row per turn or summary."
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    args = parser.parse_args(argv)
    setup_logging()
    require_new_file(args.out, "out", args.overwrite, "--overwrite")
    num_rows = export_trajectories(args.run, args.out)
    print(f"{num_rows} steps in {args.out}")


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
