"""Charts of a report: those of the framework and those that ``verl.report_sections`` adds.

A chart without logged metrics is omitted.
"""

import re
from collections.abc import Sequence

from verl.record.report.charts import Chart, Series, smooth_values
from verl.record.report.declared import DrawnSection, draw_plot, draw_section, time_color
from verl.record.report.run_data import RunData
from verl.report_sections import (
    Contribution,
    Curve,
    Plot,
    ReportSection,
    TimePart,
    insert_entries,
    load_contributions,
)

# val/<data source>/success_rate. Metric names with more parts are not of a data source.
SOURCE_RATE = re.compile(r"val/[^/]+/success_rate")
WIDE = 1120  # pixels of a chart that fills a row
SOURCE_COLORS = ("accent", "second", "ramp-3", "ramp-4", "ramp-2", "ramp-1")

ROLLOUT_TIME = "timing_s/gen"
TIME_PARTS = (  # in the order of a training step
    TimePart(ROLLOUT_TIME, "rollout"),
    TimePart("timing_s/gen_engine", "generation", within=ROLLOUT_TIME),
    TimePart("timing_s/gen_env", "environments", within=ROLLOUT_TIME),
    TimePart("timing_s/pack", "building rows", within=ROLLOUT_TIME),
    TimePart("timing_s/old_log_prob", "log-probs"),
    TimePart("timing_s/ref", "reference log-probs"),
    TimePart("timing_s/values", "values"),
    TimePart("timing_s/reward", "rewards"),
    TimePart("timing_s/adv", "advantages"),
    TimePart("timing_s/update_critic", "critic update"),
    TimePart("timing_s/update_actor", "policy update"),
    TimePart("timing_s/update_weights", "weight sync"),
)


def _small_plot(title: str, y_label: str, metric: str) -> Plot:
    return Plot(title, y_label, (Curve(metric, title),), width=352, height=190)


OPTIMISATION = ReportSection(
    "Optimisation",
    "The policy update, step by step.",
    (
        _small_plot("Policy loss", "loss", "actor/pg_loss"),
        _small_plot("Value loss", "loss", "critic/vf_loss"),
        _small_plot("KL to the reference", "nats per token", "actor/kl_loss"),
        _small_plot("Entropy of the policy", "nats per token", "actor/entropy"),
        _small_plot("Gradient norm", "L2 norm", "actor/grad_norm"),
        _small_plot("KL of one step", "nats per token", "actor/ppo_kl"),
        _small_plot("Clipped tokens", "share of tokens", "actor/pg_clipfrac"),
        _small_plot("Learning rate", "learning rate", "actor/lr"),
        _small_plot("Mean advantage", "advantage", "critic/advantages/mean"),
    ),
    columns=3,
)
HEALTH = ReportSection(
    "Health",
    "Values that should stay near zero.",
    (
        Plot(
            "Engine against trainer",
            "probability difference",
            (
                Curve("training/rollout_probs_diff_max", "max", "second"),
                Curve("training/rollout_probs_diff_mean", "mean"),
            ),
            log=True,
            width=352,
            height=200,
        ),
        Plot(
            "Aborted trajectories",
            "trajectories",
            (Curve("rollout/aborted", "aborted", "second"),),
            y_range=(0.0, None),
            width=352,
            height=200,
        ),
        Plot(
            "Data without signal",
            "share",
            (
                Curve("rollout/truncated_length", "trajectories with a cut turn", "second"),
                Curve("critic/rows_without_advantage", "rows without advantage"),
                Curve("critic/groups_of_equal_returns", "groups of equal returns", "ramp-3"),
            ),
            form="percent",
            y_range=(0.0, 1.0),
            width=352,
            height=200,
        ),
    ),
    columns=3,
)
TOKENS = Plot(
    "Sampled tokens per episode",
    "tokens",
    (
        Curve("rollout/tokens_per_episode", "training tasks", "second"),
        Curve("val/tokens_per_episode", "held-out tasks", markers=True),
    ),
    y_range=(0.0, None),
    width=352,
    height=200,
)
# Needed for environments without a success criterion, which report only a return.
RETURN = Plot(
    "Mean return",
    "return of a trajectory",
    (
        Curve("episode/reward", "training tasks", "second"),
        Curve("val/episode_reward", "held-out tasks", markers=True),
    ),
    width=WIDE,
    height=260,
)
STEPS = Plot(
    "Steps per episode",
    "steps",
    (
        Curve("episode/length", "training tasks", "second"),
        Curve("val/episode_length", "held-out"),
    ),
    y_range=(0.0, None),
    width=352,
    height=200,
)
THROUGHPUT = Plot(
    "Throughput",
    "tokens per second",
    (Curve("perf/throughput", "tokens per second"),),
    y_range=(0.0, None),
)


def report_sections(run: RunData) -> list[DrawnSection]:
    """Return all sections with at least one chart or table."""
    added = load_contributions()
    built_in = [
        success_section(run),
        effort_section(run),
        draw_section(run, OPTIMISATION),
        time_section(run, added),
        draw_section(run, HEALTH),
    ]
    declared = [draw_section(run, plan) for contribution in added for plan in contribution.sections]
    arranged = insert_entries(built_in, declared)
    for section in arranged:
        plots = [plot for other in added for title, plot in other.plots if title == section.title]
        charts = insert_entries(section.charts, [draw_plot(run, plot) for plot in plots])
        section.charts = _drop_empty(charts)
    return [section for section in arranged if section.charts or section.tables]


def _drop_empty(charts: Sequence[Chart]) -> list[Chart]:
    """Remove series without points, and charts without series."""
    for chart in charts:
        chart.series = [series for series in chart.series if series.xs]
    return [chart for chart in charts if chart.series]


def success_section(run: RunData) -> DrawnSection:
    """Return the section with success rates on held-out tasks (with intervals) and in training."""
    charts = [_success_chart(run)]
    sources = [name for name in run.metric_names if SOURCE_RATE.fullmatch(name)]
    # A single data source is the whole validation set, which the first chart shows.
    if len(sources) > 1:
        charts.append(_source_chart(run, sources))
    charts += [draw_plot(run, RETURN), _tokens_chart(run)]
    lead = "Held-out tasks are a frozen validation set that is never trained on."
    return DrawnSection("Success", lead, charts, 1)


def _success_chart(run: RunData) -> Chart:
    xs, ys = run.metric_points("val/success_rate")
    bounds = [run.success_interval(x) for x in xs]
    name = "held-out tasks, 95% bootstrap interval"
    held_out = Series(name, xs, ys, "accent", markers=True, trajectory_kind="val")
    held_out.low = [low for low, _ in bounds]
    held_out.high = [high for _, high in bounds]
    raw_line = Series(
        "training tasks", *run.metric_points("episode/success_rate"), "second", faint=True
    )
    smooth = Series("training tasks, smoothed", raw_line.xs, smooth_values(raw_line.ys), "second")
    highest = max([*raw_line.ys, *held_out.high, 0.0])
    return Chart(
        "Success rate",
        "share of successes",
        # In drawing order: the most important series is on top.
        [raw_line, smooth, held_out],
        form="percent",
        width=WIDE,
        height=330,
        # Above 75% the axis ends at 100%. Below, it ends at the highest value.
        y_range=(0.0, 1.0 if highest > 0.75 else None),
    )


def _tokens_chart(run: RunData) -> Chart:
    """Draw held-out success against tokens per episode, one point per validation.

    The chart is empty with a single validation.
    """
    costs = dict(zip(*run.metric_points("val/tokens_per_episode"), strict=True))
    steps, rates = run.metric_points("val/success_rate")
    pairs = [(step, rate) for step, rate in zip(steps, rates, strict=True) if step in costs]
    path = Series("held-out tasks", [], [], "accent", markers=True)
    if len(pairs) > 1:
        path.xs = [round(costs[step], 2) for step, _ in pairs]
        path.ys = [rate for _, rate in pairs]
        bounds = [run.success_interval(step) for step, _ in pairs]
        path.low = [low for low, _ in bounds]
        path.high = [high for _, high in bounds]
        # Label only the first and the last point: labels of all points would overlap.
        end_steps = (pairs[0][0], pairs[-1][0])
        path.labels = [f"step {step}" if step in end_steps else "" for step, _ in pairs]
    return Chart(
        "Success against tokens",
        "share of successes",
        [path],
        kind="points",
        x_label="sampled tokens per episode",
        form="percent",
        width=WIDE,
        height=260,
    )


def _source_chart(run: RunData, sources: Sequence[str]) -> Chart:
    lines = []
    # Only as many sources as colours: two lines of one colour could not be distinguished.
    for metric, color in zip(sources, SOURCE_COLORS, strict=False):
        source = metric.split("/")[1]
        lines.append(
            Series(source, *run.metric_points(metric), color, markers=True, trajectory_kind="val")
        )
    title = "Held-out success by task type"
    return Chart(title, "share of successes", lines, form="percent", width=WIDE, height=260)


def effort_section(run: RunData) -> DrawnSection:
    """Return the section with charts of tokens and turns per episode."""
    tokens_xs, tokens_ys = run.metric_points("rollout/tokens_per_episode")
    lengths = dict(zip(*run.metric_points("episode/length"), strict=True))
    step_tokens = [(x, y) for x, y in zip(tokens_xs, tokens_ys, strict=True) if lengths.get(x)]
    xs = [x for x, _ in step_tokens]
    per_step = Series("tokens", xs, [y / lengths[x] for x, y in step_tokens], "second")
    tokens_per_step = Chart(
        "Sampled tokens per step",
        "tokens",
        [per_step],
        y_range=(0.0, None),
        width=352,
        height=200,
    )
    charts = [draw_plot(run, TOKENS), tokens_per_step, draw_plot(run, STEPS)]
    return DrawnSection("Effort", "Tokens and turns per episode.", charts, 3)


def time_parts(run: RunData, added: Sequence[Contribution]) -> list[TimePart]:
    """Return the parts that add up to the time of a step.

    The rollout counts as one part only if its own parts were not measured.
    """
    known_parts = insert_entries(
        TIME_PARTS, [part for contribution in added for part in contribution.time_parts]
    )
    logged = [part for part in known_parts if part.metric in run.metric_names]
    if any(part.metric == "timing_s/gen_engine" for part in logged):
        return [part for part in logged if part.metric != ROLLOUT_TIME]
    return [part for part in logged if part.within is None]


def time_section(run: RunData, added: Sequence[Contribution]) -> DrawnSection:
    """Return the section with charts of seconds per step (by part) and of throughput."""
    layers = [
        Series(part.label, *run.metric_points(part.metric), time_color(index))
        for index, part in enumerate(time_parts(run, added))
    ]
    stacked = Chart(
        "Time per step",
        "seconds",
        layers,
        kind="stacked",
        form="seconds",
        y_range=(0.0, None),
    )
    lead = "Seconds of a training step by part, without validation and checkpoints."
    return DrawnSection("Time", lead, [stacked, draw_plot(run, THROUGHPUT)])
