"""Console figures, report sections and validation metrics of thinking levels.

Importing this module registers them.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlvcr.levels import LEVELS
from verl.report_sections import (
    CONTRIBUTIONS,
    AlternativesView,
    ConsoleFigure,
    Contribution,
    Curve,
    CurveFamily,
    KeyFigure,
    MetricColumn,
    MetricTable,
    NumberColumn,
    Outcomes,
    Plot,
    ReportSection,
    Scatter,
    StepView,
    TimePart,
)

if TYPE_CHECKING:
    from verl.protocol import DataProto

AUDIT_FILE = "audit.json"  # written by an audit into its run directory
LEVEL_NAMES = {1: "1 act at once", 2: "2 read the situation", 3: "3 reflect", 4: "4 plan"}


def level_shares(batch: "DataProto", prefix: str) -> dict[str, float]:
    """Return ``<prefix>/level_share_1..4`` and the information of levels about situations.

    Shares are among the turns with a level. Situations are those that the environment names, else
    its states (``anchor_obs``).
    """
    columns = batch.non_tensor_batch
    steps = [step for row in columns["steps"] for step in row]
    # Turns of environments without thinking levels have no level, or no such attribute.
    levels = [getattr(step, "level", None) for step in steps]
    known = [level for level in levels if level is not None]
    if not known:
        return {}
    shares = {f"{prefix}/level_share_{level}": known.count(level) / len(known) for level in LEVELS}
    states = [state for row in columns["anchor_obs"] for state in row]
    situations = [
        getattr(step, "situation", "") or state for step, state in zip(steps, states, strict=True)
    ]
    # Imported here: the command line imports this module, and importing numpy is slow.
    from rlvcr.level_metrics import level_information

    told = level_information(levels, situations)
    return shares | {name.replace("rlvcr", prefix, 1): value for name, value in told.items()}


def audited(directory: Path) -> Outcomes:
    """Return the returns of the audit rollouts in ``directory``, by turn and level.

    The dict is empty where no audit was made.
    """
    path = directory / AUDIT_FILE
    if not path.exists():
        return {}
    return {
        (point["traj_uid"], point["step"]): dict(zip(LEVELS, point["returns"], strict=True))
        for point in json.loads(path.read_text())["points"]
    }


def _by_level(metric: str, smooth: bool = False) -> tuple[Curve, ...]:
    """Return one curve per level of a metric whose name ends with the level."""
    return tuple(
        Curve(f"{metric}_{level}", LEVEL_NAMES[level], f"ramp-{level}", smooth) for level in LEVELS
    )


THINKING = ReportSection(
    "Thinking",
    "Thinking levels of the policy, and scores of its thoughts.",
    (
        Plot(
            "Share of thinking levels",
            "steps",
            _by_level("rlvcr/level_share"),
            kind="stacked",
            form="percent",
            y_range=(0.0, 1.0),
        ),
        Plot(
            "Success of episodes by level (smoothed)",
            "successful episodes",
            _by_level("rlvcr/level_success", smooth=True),
            form="percent",
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
    after="Success",
)
BY_RULE = MetricTable(
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
DIFFERENCES = (
    MetricColumn("success_difference", "success rate, points", "{:+.1f}", scale=100.0),
    MetricColumn("tokens_per_step_difference", "tokens / turn", "{:+.2f}"),
    MetricColumn("tokens_per_step_change", "tokens / turn, %", "{:+.1f}", scale=100.0),
)
LESS_FREE = MetricTable("Difference to free, paired by task", BY_RULE.prefix, "levels", DIFFERENCES)
LESS_ORACLE = MetricTable(
    "Difference to oracle, paired by task", "val/levels_less_oracle", "levels", DIFFERENCES
)
BY_SITUATION = MetricTable(
    "Levels chosen in each situation",
    "val/levels_in",
    "situation",
    (
        MetricColumn("steps", "turns", "{:.0f}"),
        MetricColumn("needed_level", "required level"),
        *(MetricColumn(f"share_{level}", LEVEL_NAMES[level], "{:.1%}") for level in LEVELS),
    ),
)
WORTH = ReportSection(
    "The choice of level",
    "The same tasks with the same seeds: the policy chooses (free), every turn has one level, "
    "levels are drawn with the shares of free (random), or the environment names the required "
    "level (oracle). Intervals are 95% over resampled tasks; differences are paired by task.",
    (
        Scatter(
            "Success against tokens",
            BY_RULE,
            x="tokens_per_step",
            y="success_rate",
            x_label="tokens per turn, including forced levels",
            y_label="successful episodes",
            colors=(
                ("random", "second"),
                ("oracle", "time-5"),
                *((f"level_{level}", f"ramp-{level}") for level in LEVELS),
            ),
            form="percent",
        ),
    ),
    columns=1,
    after="Thinking",
    tables=(BY_RULE, LESS_FREE, LESS_ORACLE, BY_SITUATION),
)
AUDITED_LEVELS = MetricTable(
    "Effects of levels",
    "audit/levels",
    "level",
    (MetricColumn("effect", "return minus the mean of all levels", "{:+.3f}"),),
)
AUDITED_SCORES = MetricTable(
    "Agreement of scores with effects",
    "audit/scores",
    "score",
    (
        MetricColumn("all_levels", "rank correlation", "{:+.2f}"),
        MetricColumn("in_won", "with success", "{:+.2f}"),
        MetricColumn("in_lost", "without success", "{:+.2f}"),
        MetricColumn("chosen_level", "of chosen levels", "{:+.2f}"),
    ),
)
AUDIT = ReportSection(
    "Credit audit",
    "At turns of finished episodes every level was forced and the episode continued to its end. "
    "The effect of a level is its mean return minus the mean of all levels. Correlations compare "
    "scores with effects.",
    (),
    after="The choice of level",
    tables=(AUDITED_LEVELS, AUDITED_SCORES),
)
UNPARSED = Plot(
    "Turns that could not be parsed",
    "share of turns",
    (CurveFamily("rlvcr/parse_fail_"),),
    form="percent",
    width=352,
    height=200,
    after="Engine against trainer",
)
THOUGHTS = AlternativesView(
    key="contexts",
    badge="level",
    text="thought",
    chosen="original",
    columns=(
        NumberColumn("tokens", "tokens"),
        NumberColumn(
            "score_logprob",
            "log-prob",
            "{:.2f}",
            "mean log-probability of the action's tokens after this thought",
            best=True,
        ),
        NumberColumn("score_entropy", "entropy", "{:.2f}", "mean entropy over the action's tokens"),
    ),
    note=("think_advantage", "thinking advantage of the sampled thought {:+.2f}"),
    outcomes=audited,
)

CONTRIBUTIONS.append(
    Contribution(
        name="rlvcr",
        console=(
            ConsoleFigure(
                "levels 1-4",
                tuple(f"rlvcr/level_share_{level}" for level in LEVELS),
                "{:.0%}",
                after="tokens/episode",
            ),
        ),
        key_figures=(
            KeyFigure(
                "thought tokens / turn",
                "rlvcr/thought_tokens_mean",
                "{:.1f}",
                after="tokens per episode",
            ),
        ),
        sections=(THINKING, WORTH, AUDIT),
        plots=(("Health", UNPARSED),),
        time_parts=(
            TimePart(
                "timing_s/alternatives",
                "alternative thoughts",
                within="timing_s/gen",
                after="timing_s/gen_env",
            ),
            TimePart("timing_s/scoring", "scoring", after="timing_s/pack"),
        ),
        steps=StepView(
            badge="level",
            flags=("parse_failure",),
            alternatives=THOUGHTS,
            lead="The tables compare the sampled thought with alternative thoughts of the other "
            "levels, by their scores of the same action.",
        ),
        batch_metrics=level_shares,
    )
)
