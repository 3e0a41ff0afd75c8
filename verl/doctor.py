"""Print what this machine can run: ``python -m verl.doctor [--no-smoke]``.

This module imports no heavy package, so that it works without torch.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl.trainer.launch.doctor.facts import FindingState, MachineFinding, collect_findings
from verl.trainer.launch.doctor.smoke import run_smoke_tests

WIDTH = 100  # columns of output that is not a terminal
STYLES = {FindingState.OK: "green", FindingState.NOTE: "yellow", FindingState.MISSING: "bold red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine and print the results: the program ``python -m verl.doctor``.

    Returns exit status 1 if something is missing that every run needs.
    """
    parser = argparse.ArgumentParser(
        prog="python -m verl.doctor", description="Check what this machine can run."
    )
    parser.add_argument(
        "--no-smoke", action="store_true", help="only read properties, run no trials"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="directory into which runs would write"
    )
    args = parser.parse_args(argv)
    findings = collect_findings(args.dir.absolute())
    if not args.no_smoke:
        findings += run_smoke_tests()
    return print_report(findings)


def print_report(findings: Sequence[MachineFinding], console: Console | None = None) -> int:
    """Print a table of ``findings``, the results of the checks of this machine, and a summary.

    Returns 1 if a finding has the state ``MISSING``, else 0.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=WIDTH, file=console.file)
    console.print(build_findings_table(findings))
    missing_names = [finding.name for finding in findings if finding.state is FindingState.MISSING]
    if missing_names:
        console.print(Text(f"training cannot run until this is fixed: {', '.join(missing_names)}"))
        return 1
    console.print("all requirements are met")
    return 0


def build_findings_table(findings: Sequence[MachineFinding]) -> Table:
    """Return a table with one row per finding (result of a check of this machine).

    The fix of a problem is below its value.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        # Text objects: rich would read square brackets in strings as markup.
        value = Text(finding.value, overflow="fold")
        if finding.fix:
            value.append(f"\n{finding.fix}", style="dim")
        table.add_row(Text(finding.name), Text(finding.state, style=STYLES[finding.state]), value)
    return table


if __name__ == "__main__":
    sys.exit(main())
