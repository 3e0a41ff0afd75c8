"""Results of ``main_audit``: metrics for report and console, and a file of all measured turns.

A point is one audited turn. A score is the credit that a rule gives to a level or action. The
effect of a level or action is the mean return of its continuations, minus the mean over all of
them.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlvcr.report_sections import AUDIT_FILE, LEVEL_EFFECT_TABLE, SCORE_AGREEMENT_TABLE
from rlvcr.research.audit import AuditedTurn, AuditResult
from verl.record.console import show_tables
from verl.utils.jsonl import to_json_types, write_text_atomically
from verl.utils.statistics import make_interval_metrics


def compute_audit_metrics(result: AuditResult) -> dict[str, float]:
    """Return the metrics ``audit/...`` of ``main_audit``: counts, effects and correlations."""
    metrics = {
        "audit/points": float(result.points),
        "audit/plays": float(result.rollouts_per_option),
        "audit/reliability": result.reliability,
    }
    for level, interval in enumerate(result.level_effects, start=1):
        name = f"{LEVEL_EFFECT_TABLE.prefix}/level_{level}/effect"
        metrics |= make_interval_metrics(name, *interval)
    for score in (result.second_audit, *result.scores):
        metric_prefix = f"{SCORE_AGREEMENT_TABLE.prefix}/{score.name}"
        for name in ("all_levels", "in_won", "in_lost", "chosen"):
            interval = getattr(score, name)
            if interval is not None:
                metrics |= make_interval_metrics(f"{metric_prefix}/{name}", *interval)
    # Omit NaN, such as the correlation of a constant score: metrics files cannot store it.
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def write_audit_file(
    audited_turns: Sequence[AuditedTurn],
    result: AuditResult,
    directory: Path,
    skip_reasons: Mapping[str, str] | None = None,
) -> Path:
    """Write the audited turns with returns and credit as JSON. Return the path of the file."""
    path = directory / AUDIT_FILE
    audit = dataclasses.asdict(result)
    # Files of earlier versions have these keys.
    audit["levels"] = audit.pop("level_effects")
    audit["plays"] = audit.pop("rollouts_per_option")
    content = {
        "audit": audit,
        "skipped": dict(skip_reasons or {}),
        "points": [dataclasses.asdict(point) for point in audited_turns],
    }
    write_text_atomically(path, json.dumps(to_json_types(content), indent=1) + "\n")
    return path


def print_audit_tables(metrics: dict[str, float]) -> None:
    """Print the effects of thinking levels on the return.

    Also print how the credit (advantage) that each estimator gives to a level correlates with them.
    """
    show_tables((LEVEL_EFFECT_TABLE, SCORE_AGREEMENT_TABLE), metrics)
