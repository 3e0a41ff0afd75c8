"""The table of ``python -m verl.doctor``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl.trainer.launch.doctor.facts import Finding, State, all_findings
from verl.trainer.launch.doctor.smoke import smoke_findings

WIDTH = 100  # columns where no terminal says how wide it is
STYLES = {State.OK: "green", State.NOTE: "yellow", State.MISSING: "bold red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where something is missing that every run needs."""
    parser = argparse.ArgumentParser(
        prog="python -m verl.doctor", description="What this machine can run."
    )
    parser.add_argument("--no-smoke", action="store_true", help="look only, try nothing")
    parser.add_argument("--dir", type=Path, default=Path(), help="where runs would write to")
    words = parser.parse_args(argv)
    findings = all_findings(words.dir.absolute())
    if not words.no_smoke:
        findings += smoke_findings()
    return report(findings)


def report(findings: Sequence[Finding], console: Console | None = None) -> int:
    """Print the table and what it comes to; 0, or 1 where something is missing."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=WIDTH, file=console.file)
    console.print(findings_table(findings))
    missing = [finding.name for finding in findings if finding.state is State.MISSING]
    if missing:
        console.print(Text(f"nothing trains here before this is mended: {', '.join(missing)}"))
        return 1
    console.print("everything that is needed is there")
    return 0


def findings_table(findings: Sequence[Finding]) -> Table:
    """A line per finding; what to do stands below what was found."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        # As text: rich would read square brackets as markup, and cut what is too long.
        said = Text(finding.value, overflow="fold")
        if finding.fix:
            said.append(f"\n{finding.fix}", style="dim")
        table.add_row(Text(finding.name), Text(finding.state, style=STYLES[finding.state]), said)
    return table
