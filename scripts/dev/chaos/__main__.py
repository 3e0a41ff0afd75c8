"""Command line of ``python -m scripts.dev.chaos``; the package's docstring says what it does."""

import argparse
import logging
import sys
from collections.abc import Sequence

import scripts.dev.chaos
from scripts.dev.chaos import kills, outcomes, torn
from scripts.dev.chaos.cells import Cell, cell_of, every_cell
from scripts.dev.chaos.job import FOLDER, policy
from scripts.dev.chaos.matrix import WRONG, play


def main(argv: Sequence[str] | None = None) -> int:
    """Play what is asked for. 1 where anything was wrong."""
    parser = argparse.ArgumentParser(
        description=scripts.dev.chaos.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    matrix = commands.add_parser("matrix", help="strike every part at every stage")
    matrix.add_argument("cells", nargs="*", help="PART/STAGE/DEED, or the beginning of it")
    matrix.add_argument("--report", action="store_true", help="play nothing, write the page")
    matrix.add_argument("--again", action="store_true", help="forget earlier results")
    killing = commands.add_parser("kills", help="SIGKILL at random moments")
    killing.add_argument("--count", type=int, default=100)
    killing.add_argument("--seed", type=int, default=0)
    tearing = commands.add_parser("torn", help="damage checkpoint files")
    tearing.add_argument("--count", type=int, default=1000)
    tearing.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    # What is passed over is what is looked for.
    logging.getLogger("verl.utils.checkpoint").setLevel(logging.ERROR)
    if args.command == "torn":
        return torn.run(args.count, args.seed)
    if args.command == "kills":
        return kills.run(args.count, args.seed)
    if args.report:
        outcomes.write_page(outcomes.read())
        return 0
    return run_matrix(args.cells, args.again)


def run_matrix(names: Sequence[str], again: bool) -> int:
    """Play the cells that ``names`` are the beginnings of, all of them by default; 1 where one went
    wrong.
    """
    chosen = [cell for cell in every_cell() if _is_named(cell, names) and not cell.senseless]
    if not chosen:
        cell_of(names[0])  # says which there are
    results = outcomes.read()
    for cell in chosen:
        known = results.get(cell.key)
        if known is not None and not known.verdict.startswith(WRONG) and not again:
            continue
        results[cell.key] = play(cell, policy(), FOLDER / cell.key.replace("/", "-"))
        outcomes.keep(results)
        result = results[cell.key]
        sys.stderr.write(f"{cell.key}: {result.verdict}, {result.seconds} s: {result.sentence}\n")
    return int(any(results[cell.key].verdict.startswith(WRONG) for cell in chosen))


def _is_named(cell: Cell, names: Sequence[str]) -> bool:
    return not names or any(cell.key.startswith(name) for name in names)


if __name__ == "__main__":
    sys.exit(main())
