"""``python -m verl.record.report RUN_DIR [...]`` writes ``report.html`` into each run directory."""

import argparse

from verl.record.report.page import write_report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m verl.record.report", description="Write report.html of a run."
    )
    parser.add_argument(
        "run_dir", nargs="+", help="run directory, for example runs/rlvcr/quickstart"
    )
    for run_dir in parser.parse_args().run_dir:
        print(write_report(run_dir))


if __name__ == "__main__":
    main()
