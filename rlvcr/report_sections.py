"""Numbers of a step's console line, report sections, and validation metrics of thinking levels.

Importing this module registers them.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlvcr.levels import LEVELS
from verl.report_sections import (
    CONTRIBUTIONS,
    AlternativesView,
    ConsoleMetric,
    Curve,
    CurveFamily,
    HeadlineMetric,
    MetricColumn,
    MetricTable,
    NumberColumn,
    Outcomes,
    Plot,
    ReportContribution,
    ReportSection,
    Scatter,
    TurnView,
)

if TYPE_CHECKING:
    from verl.protocol import DataProto

AUDIT_FILE = "audit.json"  # written by ``main_audit`` into its run directory
LEVEL_NAMES = {1: "1 act at once", 2: "2 read the situation", 3: "3 reflect", 4: "4 plan"}


def compute_level_shares(batch: "DataProto", prefix: str) -> dict[str, float]:
    """Return shares of the thinking levels, and the mutual information of levels and situations.

    The metrics are ``<prefix>/level_share_1..4`` and ``<prefix>/level_information``. Shares are
    among the turns with a level. A situation is the kind of state that the environment names. Where
    it names none, the observation (``anchor_obs``) is used.
    """
    columns = batch.non_tensor_batch
    turns = [step for row in columns["steps"] for step in row]
    # Turns of environments without thinking levels have no level, or no such attribute.
    levels = [getattr(step, "level", None) for step in turns]
    known_levels = [level for level in levels if level is not None]
    if not known_levels:
        return {}
    level_shares = {
        f"{prefix}/level_share_{level}": known_levels.count(level) / len(known_levels)
        for level in LEVELS
    }
    states = [state for row in columns["anchor_obs"] for state in row]
    situations = [
        getattr(step, "situation", "") or state for step, state in zip(turns, states, strict=True)
    ]
    # Imported here: the command line imports this module, and importing numpy is slow.
    from rlvcr.level_metrics import compute_level_mutual_information

    information_metrics = compute_level_mutual_information(levels, situations)
    return level_shares | {
        name.replace("rlvcr", prefix, 1): value for name, value in information_metrics.items()
    }


def load_audit_returns(directory: Path) -> Outcomes:
    """Return the returns of continued episodes that ``main_audit`` wrote to ``directory``.

    The program ``main_audit`` executes each thinking level or action at a turn, and continues the
    episode to its end. The keys are (``traj_uid``, turn number); the values map the number of each
    level or action to its returns. The result is empty if the directory has no ``audit.json``.
    """
    path = directory / AUDIT_FILE
    if not path.exists():
        return {}
    return {
        (point["traj_uid"], point["step"]): dict(enumerate(point["returns"], start=1))
        for point in json.loads(path.read_text())["points"]
    }


def _make_curves_by_level(metric: str, smooth: bool = False) -> tuple[Curve, ...]:
    """Return a curve per thinking level, of the metrics ``<metric>_1`` to ``<metric>_4``."""
    return tuple(
        Curve(f"{metric}_{level}", LEVEL_NAMES[level], f"ramp-{level}", smooth) for level in LEVELS
    )


THINKING_SECTION = ReportSection(
    "Thinking",
    "Thinking levels of the policy, and scores of its thoughts.",
    (
        Plot(
            "Share of thinking levels",
            "steps",
            _make_curves_by_level("rlvcr/level_share"),
            kind="stacked",
            number_format="percent",
            y_range=(0.0, 1.0),
        ),
        Plot(
            "Success of episodes by level (smoothed)",
            "successful episodes",
            _make_curves_by_level("rlvcr/level_success", smooth=True),
            number_format="percent",
        ),
        Plot(
            "Mutual information of level and situation",
            "nats",
            (
                Curve("rlvcr/level_information", "of the chosen levels"),
                Curve("rlvcr/level_information_null", "of permuted levels", "second"),
            ),
            y_range=(0.0, None),
        ),
        Plot(
            "Thought length",
            "tokens per turn",
            (Curve("rlvcr/thought_tokens_mean", "tokens"),),
            y_range=(0.0, None),
        ),
        Plot(
            "Score of the sampled action",
            "nats per token",
            (
                Curve("rlvcr/score_logprob", "log-prob of the action"),
                Curve("rlvcr/score_entropy", "entropy over the action", "second"),
            ),
        ),
    ),
)
RULE_TABLE = MetricTable(
    "Success and tokens of level rules",
    "val/levels",
    "levels",
    (
        MetricColumn("success_rate", "successful episodes", "{:.1%}"),
        MetricColumn("tokens_per_step", "tokens / turn", "{:.2f}"),
        MetricColumn("sampled_tokens_per_step", "sampled / turn"),
        MetricColumn("sampled_tokens_per_episode", "sampled / episode"),
    ),
)
DIFFERENCE_COLUMNS = (
    MetricColumn("success_difference", "success rate, points", "{:+.1f}", scale=100.0),
    MetricColumn("tokens_per_step_difference", "tokens / turn", "{:+.2f}"),
    MetricColumn("tokens_per_step_change", "tokens / turn, %", "{:+.1f}", scale=100.0),
)
FREE_DIFFERENCE_TABLE = MetricTable(
    "Difference to free, paired by task", RULE_TABLE.prefix, "levels", DIFFERENCE_COLUMNS
)
ORACLE_DIFFERENCE_TABLE = MetricTable(
    "Difference to oracle, paired by task", "val/levels_less_oracle", "levels", DIFFERENCE_COLUMNS
)
SITUATION_TABLE = MetricTable(
    "Levels chosen in each situation",
    "val/levels_in",
    "situation",
    (
        MetricColumn("steps", "turns", "{:.0f}"),
        MetricColumn("needed_level", "required level"),
        *(MetricColumn(f"share_{level}", LEVEL_NAMES[level], "{:.1%}") for level in LEVELS),
    ),
)
LEVEL_CHOICE_SECTION = ReportSection(
    "The choice of level",
    "The same tasks with the same seeds: the policy chooses (free), every turn has one level, "
    "levels are drawn with the shares of free (random), or the environment names the required "
    "level (oracle). Intervals are 95% over resampled tasks; differences are paired by task.",
    (
        Scatter(
            "Success against tokens",
            RULE_TABLE,
            x="tokens_per_step",
            y="success_rate",
            x_label="tokens per turn, including forced levels",
            y_label="successful episodes",
            colors=(
                ("random", "second"),
                ("oracle", "time-5"),
                *((f"level_{level}", f"ramp-{level}") for level in LEVELS),
            ),
            number_format="percent",
        ),
    ),
    columns=1,
    tables=(RULE_TABLE, FREE_DIFFERENCE_TABLE, ORACLE_DIFFERENCE_TABLE, SITUATION_TABLE),
)
LEVEL_EFFECT_TABLE = MetricTable(
    "Effects of levels",
    "audit/levels",
    "level",
    (MetricColumn("effect", "return minus the mean of all levels", "{:+.3f}"),),
)
SCORE_AGREEMENT_TABLE = MetricTable(
    "Agreement of credit rules with effects",
    "audit/scores",
    "rule",
    (
        MetricColumn("all_levels", "all levels", "{:+.2f}"),
        MetricColumn("in_won", "with success", "{:+.2f}"),
        MetricColumn("in_lost", "without success", "{:+.2f}"),
        MetricColumn("chosen", "chosen option", "{:+.2f}"),
    ),
)
AUDIT_SECTION = ReportSection(
    "Credit audit",
    "At turns of finished episodes every level, or several actions, were executed and the episode "
    "continued to its end. The effect of each is its mean return minus the mean of all. Rank "
    "correlations compare credit rules with effects. The second audit is the expected correlation "
    "of two audits of these turns; a perfect rule would reach its square root.",
    (),
    tables=(LEVEL_EFFECT_TABLE, SCORE_AGREEMENT_TABLE),
)
UNPARSED_PLOT = Plot(
    "Turns that could not be parsed",
    "share of turns",
    (CurveFamily("rlvcr/parse_fail_"),),
    number_format="percent",
    width=352,
    height=200,
)
THOUGHTS_VIEW = AlternativesView(
    key="contexts",
    badge_key="level",
    text="thought",
    chosen_key="original",
    columns=(
        NumberColumn("tokens", "tokens"),
        NumberColumn(
            "score_logprob",
            "log-prob",
            "{:.2f}",
            "mean log-probability of the action's tokens after this thought",
            highlights_largest=True,
        ),
        NumberColumn("score_entropy", "entropy", "{:.2f}", "mean entropy over the action's tokens"),
    ),
    note=("think_advantage", "thinking advantage of the sampled thought {:+.2f}"),
    outcomes=load_audit_returns,
)

CONTRIBUTIONS.append(
    ReportContribution(
        name="rlvcr",
        console_metrics=(
            ConsoleMetric(
                "levels 1-4",
                tuple(f"rlvcr/level_share_{level}" for level in LEVELS),
                "{:.0%}",
            ),
        ),
        headline_metrics=(
            HeadlineMetric(
                "thought tokens / turn",
                "rlvcr/thought_tokens_mean",
                "{:.1f}",
            ),
        ),
        sections=(THINKING_SECTION, LEVEL_CHOICE_SECTION, AUDIT_SECTION),
        health_plots=(UNPARSED_PLOT,),
        turn_view=TurnView(
            badge_key="level",
            flags=("parse_failure",),
            alternatives=THOUGHTS_VIEW,
            lead="The tables compare the sampled thought with alternative thoughts of the other "
            "levels, by their scores of the same action.",
        ),
        batch_metrics=compute_level_shares,
    )
)
