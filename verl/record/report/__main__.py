"""``python -m verl.record.report RUN_DIR`` writes ``report.html`` into the run directory; of
several runs it writes one page.
"""

import argparse
from pathlib import Path

from verl.record.report.page import write_comparison, write_report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m verl.record.report",
        description="Write report.html of a run, or one page that compares several.",
    )
    parser.add_argument(
        "run_dir", nargs="+", help="run directory, for example runs/rlvcr/quickstart"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="where the page of several runs goes; by default comparison.html in the nearest "
        "folder that they share",
    )
    words = parser.parse_args()
    if len(words.run_dir) > 1:
        print(write_comparison(words.run_dir, words.out))
    elif words.out is not None:
        parser.error("--out is for several runs: the report of one is in its directory")
    else:
        print(write_report(words.run_dir[0]))


if __name__ == "__main__":
    main()
