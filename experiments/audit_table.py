"""Compare credit audits of several runs in one table: a line per credit rule, a column per run.

python experiments/audit_table.py relay=runs/relay/rlvcr quickstart=runs/quickstart/rlvcr

A credit rule gives each thinking level of a turn a number, such as the log-prob of the action. An
audit measures the effect of each level on the return, by episodes in which it is forced. First,
``main_audit`` audits each run and writes ``RUN_DIR/audit/audit.json``.

A cell has the rank correlation of a rule with these effects, and its 95% interval over tasks. The
correlation is over the levels that the trajectories chose. With ``--over`` it is over
all levels of the audited turns, or of those in successful or unsuccessful trajectories. Rules
without a value in any audit are omitted.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvcr.report_sections import AUDIT_FILE
from verl.record.report.trajectory_chunks import AUDIT_FOLDER
from verl.utils.commands import UsageError, run_and_report_mistakes

LEVEL_SELECTIONS = ("chosen", "all_levels", "in_won", "in_lost")
Audit = Mapping[str, Any]
"""results of one audit: the value of ``audit`` in ``audit.json``"""


def read_audit(run_dir: Path) -> Audit:
    """Return the audit results of a run. Raises ``UsageError`` if there are none."""
    path = run_dir / AUDIT_FOLDER / AUDIT_FILE
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file; allowed: a run directory with an audit; "
            f"fix: python -m verl.trainer.main_audit {run_dir}",
            "missing_file",
        )
    return json.loads(path.read_text())["audit"]


def format_score_cell(score: Mapping[str, Any] | None, level_selection: str) -> str:
    """Return a rank correlation with its 95% interval: "+0.56 (+0.08 to +0.87)", or "".

    ``level_selection`` selects the compared levels, one of ``LEVEL_SELECTIONS``.
    """
    value_and_interval = score[level_selection] if score else None
    # Unknown numbers are null in the file, or NaN in files of earlier versions.
    value, low, high = (
        math.nan if x is None else x for x in value_and_interval or (None, None, None)
    )
    if math.isnan(value):  # for example because all scores are equal
        return ""
    # An audit of one task has no interval.
    return f"{value:+.2f}" if math.isnan(low) else f"{value:+.2f} ({low:+.2f} to {high:+.2f})"


def format_table(audits: Mapping[str, Audit], level_selection: str) -> str:
    """Return the Markdown table: correlations with the return, by credit rule and audited run."""
    lines = [f"| | {' | '.join(audits)} |", "|---" * (len(audits) + 1) + "|"]

    def add_line(name: str, cells: Sequence[str]) -> None:
        lines.append(f"| {name} | {' | '.join(cells)} |")

    effect_cells = [
        " ".join(f"{interval[0]:+.2f}" for interval in audit["levels"]) for audit in audits.values()
    ]
    add_line("audited turns", [f"{audit['points']}" for audit in audits.values()])
    add_line("effect of levels 1 to 4 on the return", effect_cells)
    scores_by_run = {
        name: {score["name"]: score for score in (audit["second_audit"], *audit["scores"])}
        for name, audit in audits.items()
    }
    rule_names = dict.fromkeys(
        rule for scores_by_rule in scores_by_run.values() for rule in scores_by_rule
    )
    for rule in rule_names:
        cells = [
            format_score_cell(scores_by_rule.get(rule), level_selection)
            for scores_by_rule in scores_by_run.values()
        ]
        if any(cells):
            add_line(rule.replace("_", " "), cells)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of credit audits for the runs that the arguments name."""
    parser = argparse.ArgumentParser(description="Compare credit audits of several runs.")
    parser.add_argument("audits", nargs="+", metavar="NAME=RUN_DIR")
    parser.add_argument(
        "--over", choices=LEVEL_SELECTIONS, default="chosen", help="levels to compare"
    )
    args = parser.parse_args(argv)
    audits = {}
    for argument in args.audits:
        name, separator, run_dir = argument.partition("=")
        if not separator or not run_dir:
            message = f"{argument!r}: allowed: NAME=RUN_DIR; fix: relay=runs/relay/rlvcr"
            raise UsageError(message, "invalid_syntax")
        if name in audits or "|" in name:
            raise UsageError(
                f"{name!r}: allowed: different names without '|'; fix: rename it", "invalid_syntax"
            )
        audits[name] = read_audit(Path(run_dir))
    sys.stdout.write(f"{format_table(audits, args.over)}\n")


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
