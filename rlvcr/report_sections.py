"""What thinking levels add to console, report and validation; importing this contributes it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlvcr.levels import LEVELS
from verl.report_sections import (
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
    contribute,
)

if TYPE_CHECKING:
    from verl.protocol import DataProto

AUDIT_FILE = "audit.json"  # what an audit leaves in the directory of its plays
LEVEL_NAMES = {1: "1 act at once", 2: "2 read the situation", 3: "3 reflect", 4: "4 plan"}


def level_shares(batch: "DataProto", prefix: str) -> dict[str, float]:
    """``<prefix>/level_share_1..4``: the share of each level among the steps that have one, and
    what levels say about situations (``level_information``): those that the environment names,
    else its states (``anchor_obs``).
    """
    columns = batch.non_tensor_batch
    steps = [step for row in columns["steps"] for step in row]
    # Steps of environments that ask for no levels have none, or are no thinking steps at all.
    levels = [getattr(step, "level", None) for step in steps]
    known = [level for level in levels if level is not None]
    if not known:
        return {}
    shares = {f"{prefix}/level_share_{level}": known.count(level) / len(known) for level in LEVELS}
    states = [state for row in columns["anchor_obs"] for state in row]
    situations = [
        getattr(step, "situation", "") or state for step, state in zip(steps, states, strict=True)
    ]
    # By call: the command line imports this module, and numpy is not light.
    from rlvcr.level_metrics import level_information

    told = level_information(levels, situations)
    return shares | {name.replace("rlvcr", prefix, 1): value for name, value in told.items()}


def audited(directory: Path) -> Outcomes:
    """What an audit whose plays are in ``directory`` found: returns of the plays that went on from
    a step at every level; nothing where there was none.
    """
    path = directory / AUDIT_FILE
    if not path.exists():
        return {}
    return {
        (point["traj_uid"], point["step"]): dict(zip(LEVELS, point["returns"], strict=True))
        for point in json.loads(path.read_text())["points"]
    }


def _by_level(metric: str, smooth: bool = False) -> tuple[Curve, ...]:
    """One curve per level of a metric whose name ends with the level."""
    return tuple(
        Curve(f"{metric}_{level}", LEVEL_NAMES[level], f"ramp-{level}", smooth) for level in LEVELS
    )


THINKING = ReportSection(
    "Thinking",
    "How much the policy thinks, and what its thoughts are worth to it.",
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
            "episodes won",
            _by_level("rlvcr/level_success", smooth=True),
            form="percent",
        ),
        Plot(
            "What the level says about the situation",
            "nats",
            (
                Curve("rlvcr/level_information", "of the levels chosen"),
                Curve("rlvcr/level_information_null", "of the same levels dealt anew", "second"),
            ),
            y_range=(0.0, None),
        ),
        Plot(
            "Thought length",
            "tokens per step",
            (Curve("rlvcr/thought_tokens_mean", "tokens"),),
            y_range=(0.0, None),
        ),
        Plot(
            "Certainty about the action",
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
    "What the choice of level is worth",
    "val/levels",
    "levels",
    (
        MetricColumn("success_rate", "episodes won", "{:.1%}"),
        MetricColumn("tokens_per_step", "tokens / step", "{:.2f}"),
        MetricColumn("sampled_tokens_per_step", "sampled / step"),
        MetricColumn("sampled_tokens_per_episode", "sampled / episode"),
    ),
)
DIFFERENCES = (
    MetricColumn("success_difference", "episodes won, points", "{:+.1f}", scale=100.0),
    MetricColumn("tokens_per_step_difference", "tokens / step", "{:+.2f}"),
    MetricColumn("tokens_per_step_change", "tokens / step, %", "{:+.1f}", scale=100.0),
)
LESS_FREE = MetricTable("Less free, task by task", BY_RULE.prefix, "levels", DIFFERENCES)
LESS_ORACLE = MetricTable(
    "Less oracle, task by task", "val/levels_less_oracle", "levels", DIFFERENCES
)
BY_SITUATION = MetricTable(
    "Levels chosen in each situation",
    "val/levels_in",
    "situation",
    (
        MetricColumn("steps", "steps", "{:.0f}"),
        MetricColumn("needed_level", "needed"),
        *(MetricColumn(f"share_{level}", LEVEL_NAMES[level], "{:.1%}") for level in LEVELS),
    ),
)
WORTH = ReportSection(
    "The choice of level",
    "The same tasks with the same seeds: the policy chooses (free), every step has one level, "
    "levels are drawn with the shares of free (random), or the environment says what is needed "
    "(oracle). Intervals are 95% over resampled tasks; differences have the same tasks on both "
    "sides.",
    (
        Scatter(
            "Success against tokens",
            BY_RULE,
            x="tokens_per_step",
            y="success_rate",
            x_label="tokens per step, a forced level's included",
            y_label="episodes won",
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
    "What levels are worth",
    "audit/levels",
    "level",
    (MetricColumn("effect", "return, less the mean of all levels", "{:+.3f}"),),
)
AUDITED_SCORES = MetricTable(
    "What scores say of it",
    "audit/scores",
    "score",
    (
        MetricColumn("all_levels", "rank correlation", "{:+.2f}"),
        MetricColumn("in_won", "in won plays", "{:+.2f}"),
        MetricColumn("in_lost", "in lost plays", "{:+.2f}"),
        MetricColumn("chosen_level", "the chosen level", "{:+.2f}"),
    ),
)
AUDIT = ReportSection(
    "Credit audit",
    "From steps of played tasks every level was forced and played on with: what these plays earned "
    "is the effect of the level there, and a score is as good as it agrees with it.",
    (),
    after="The choice of level",
    tables=(AUDITED_LEVELS, AUDITED_SCORES),
)
UNPARSED = Plot(
    "Steps that could not be parsed",
    "share of steps",
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

contribute(
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
                "thought tokens / step",
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
            lead="The tables compare the sampled thought with thoughts of the other levels by what "
            "they make of the same action.",
        ),
        batch_metrics=level_shares,
    )
)
