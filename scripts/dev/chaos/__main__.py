"""Command line of ``python -m scripts.dev.chaos``, described in the package's docstring."""

import argparse
import logging
import sys
from collections.abc import Sequence

import scripts.dev.chaos
from scripts.dev.chaos import damaged_checkpoints, kills, outcomes
from scripts.dev.chaos.cells import iter_cells, parse_cell
from scripts.dev.chaos.job import FOLDER, make_policy
from scripts.dev.chaos.matrix import WRONG, run_cell


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command (matrix, kills or torn). Return 1 if it found any problem."""
    parser = argparse.ArgumentParser(
        description=scripts.dev.chaos.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    matrix_parser = commands.add_parser(
        "matrix", help="inject faults into every part at every stage"
    )
    matrix_parser.add_argument("cells", nargs="*", help="PART/STAGE/FAULT, or the beginning of it")
    matrix_parser.add_argument("--report", action="store_true", help="run nothing, write the page")
    matrix_parser.add_argument("--again", action="store_true", help="ignore earlier results")
    for name, count, text in (
        ("kills", 100, "SIGKILL at random moments"),
        ("torn", 1000, "damage checkpoint files"),
    ):
        command_parser = commands.add_parser(name, help=text)
        command_parser.add_argument("--count", type=int, default=count)
        command_parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    # Hide the warnings about ignored checkpoints: the commands damage checkpoints on purpose.
    logging.getLogger("verl.utils.checkpoint").setLevel(logging.ERROR)
    if args.command == "torn":
        return damaged_checkpoints.run(args.count, args.seed)
    if args.command == "kills":
        return kills.run(args.count, args.seed)
    if args.report:
        outcomes.write_page(outcomes.read_results())
        return 0
    return run_matrix(args.cells, args.again)


def run_matrix(names: Sequence[str], reruns_finished_cells: bool) -> int:
    """Run the cells of the fault matrix whose key starts with one of ``names`` (default: all).

    Cells with an earlier result are skipped, unless ``reruns_finished_cells`` is true. Return 1 if
    the verdict of a cell is wrong. Raises ``ValueError`` if no cell matches.
    """
    cells = [
        cell
        for cell in iter_cells()
        if cell.cell_key.startswith(tuple(names) or "") and not cell.skip_reason
    ]
    if not cells:
        parse_cell(names[0])  # no cell matches: raise an error that lists all cells
    results = outcomes.read_results()
    for cell in cells:
        key = cell.cell_key
        is_finished = key in results and not results[key].verdict.startswith(WRONG)
        if is_finished and not reruns_finished_cells:
            continue
        result = run_cell(cell, make_policy(), FOLDER / key.replace("/", "-"))
        results[key] = result
        outcomes.write_results(results)
        sys.stderr.write(f"{key}: {result.verdict}, {result.seconds} s: {result.error_line}\n")
    return int(any(results[cell.cell_key].verdict.startswith(WRONG) for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
