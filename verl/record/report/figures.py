"""Charts and key figures of a report: those of the framework and those that other packages add.

A chart without logged metrics is omitted.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from verl.record.report.charts import Chart, Series, format_number, smooth_values
from verl.record.report.run_data import RunData
from verl.report_sections import (
    Contribution,
    Curve,
    CurveFamily,
    KeyFigure,
    MetricTable,
    PlacedEntry,
    Plot,
    ReportSection,
    Scatter,
    TimePart,
    insert_entries,
    load_contributions,
)

# ---- drawing of declarations -------------------------------------------------------------------

NUM_TIME_COLORS = 8


@functools.cache
def read_built_in_sections() -> dict[str, ReportSection]:
    """Return the sections of ``charts.yaml`` by key."""
    text = Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, ReportSection]).validate_python(yaml.safe_load(text))


@dataclass
class NumberTable:
    """Table whose cells are texts. The first cell of a line is the name of the line."""

    title: str
    head: list[str]
    lines: list[list[str]]


@dataclass
class DrawnSection(PlacedEntry):
    """Section of the report: heading, charts (``columns`` in a row) and tables below them."""

    title: str
    lead: str
    charts: list[Chart] = field(default_factory=list)
    columns: int = 2
    placed_after: str | None = None
    tables: list[NumberTable] = field(default_factory=list)


def draw_section(run: RunData, plan: ReportSection) -> DrawnSection:
    """Draw the section ``plan`` with the metrics of ``run``."""
    charts = [
        draw_scatter(run, plot) if isinstance(plot, Scatter) else draw_plot(run, plot)
        for plot in plan.plots
    ]
    tables = [draw_table(run, table) for table in plan.tables]
    with_lines = [table for table in tables if table.lines]
    return DrawnSection(plan.title, plan.lead, charts, plan.columns, plan.placed_after, with_lines)


def draw_table(run: RunData, table: MetricTable) -> NumberTable:
    """Fill ``table`` with the last values of its metrics in ``run``."""
    values = run.last_values(f"{table.prefix}/")
    head = [table.head, *(column.title for column in table.columns)]
    lines = [table.line_cells(values, name) for name in table.line_names(values)]
    return NumberTable(table.title, head, lines)


def draw_scatter(run: RunData, scatter: Scatter) -> Chart:
    """Draw ``scatter``: one point per table line, at the last values of its metrics in ``run``."""
    values = run.last_values(f"{scatter.table.prefix}/")
    points = [_scatter_point(scatter, name, values) for name in scatter.table.line_names(values)]
    return Chart.from_plan(scatter, points, kind="points")


def _scatter_point(scatter: Scatter, name: str, values: Mapping[str, float]) -> Series:
    """Return the labelled point of one table line. It has no position if x or y was not logged."""
    line = f"{scatter.table.prefix}/{name}"
    point_label = name.replace("_", " ")
    point = Series(
        point_label, [], [], dict(scatter.colors).get(name, "accent"), labels=[point_label]
    )
    x = values.get(f"{line}/{scatter.x}")
    y = values.get(f"{line}/{scatter.y}")
    if x is not None and y is not None:
        # The page shows this number at the cursor. Two decimals are enough.
        point.xs = [round(x, 2)]
        point.ys = [y]
        point.low = [values.get(f"{line}/{scatter.y}_low", y)]
        point.high = [values.get(f"{line}/{scatter.y}_high", y)]
        x_low = values.get(f"{line}/{scatter.x}_low")
        x_high = values.get(f"{line}/{scatter.x}_high")
        if x_low is not None and x_high is not None:
            point.left = [x_low]
            point.right = [x_high]
    return point


def draw_plot(run: RunData, plot: Plot) -> Chart:
    """Draw ``plot`` with the metrics of ``run``."""
    series = [curve_line for curve in plot.curves for curve_line in _curve_series(run, curve)]
    if plot.log:
        for line in series:
            # A logarithmic axis cannot show the other points.
            pairs = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if y > 0]
            line.xs, line.ys = [x for x, _ in pairs], [y for _, y in pairs]
    return Chart.from_plan(plot, series)


def _curve_series(run: RunData, curve: Curve | CurveFamily) -> list[Series]:
    if isinstance(curve, CurveFamily):
        metrics = [name for name in run.metric_names if name.startswith(curve.prefix)]
        return [
            # Colours repeat after NUM_TIME_COLORS. Neighbours still differ.
            Series(
                name.removeprefix(curve.prefix),
                *run.metric_points(name),
                time_color(index),
                trajectory_kind=trajectory_kind_of(name),
            )
            for index, name in enumerate(metrics)
        ]
    xs, ys = run.metric_points(curve.metric)
    if curve.smooth:
        ys = smooth_values(ys)
    kind = trajectory_kind_of(curve.metric)
    return [Series(curve.name, xs, ys, curve.color, markers=curve.markers, trajectory_kind=kind)]


def trajectory_kind_of(metric: str) -> str:
    """Return ``val`` if ``metric`` is computed from validation trajectories, else ``train``."""
    return "val" if metric.startswith("val/") else "train"


def time_color(index: int) -> str:
    """Return the colour name of curve ``index``. Colours repeat after ``NUM_TIME_COLORS``."""
    return f"time-{index % NUM_TIME_COLORS}"


# ---- sections of the report --------------------------------------------------------------------

# val/<data source>/success_rate. Metric names with more parts are not of a data source.
SOURCE_RATE = re.compile(r"val/[^/]+/success_rate")
WIDE = 1120  # pixels of a chart that fills a row
SOURCE_COLORS = ("accent", "second", "ramp-3", "ramp-4", "ramp-2", "ramp-1")

LARGE_MISMATCH = 2e-2  # mean difference of engine and trainer probabilities that is shown as bad
KEY_FIGURES = (KeyFigure("tokens per episode", "rollout/tokens_per_episode", "{:.0f}"),)

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


def report_sections(run: RunData) -> list[DrawnSection]:
    """Return all sections with at least one chart or table."""
    added = load_contributions()
    plans = read_built_in_sections()
    built_in = [
        success_section(run),
        effort_section(run),
        draw_section(run, plans["optimisation"]),
        time_section(run, added),
        draw_section(run, plans["health"]),
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
    section = draw_section(run, read_built_in_sections()["success"])
    charts = [_success_chart(run)]
    sources = [name for name in run.metric_names if SOURCE_RATE.fullmatch(name)]
    # A single data source is the whole validation set, which the first chart shows.
    if len(sources) > 1:
        charts.append(_source_chart(run, sources))
    section.charts = [*charts, *section.charts, _tokens_chart(run)]
    return section


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
    """Draw held-out success against tokens per episode; empty with a single validation."""
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
    section = draw_section(run, read_built_in_sections()["effort"])
    tokens_xs, tokens_ys = run.metric_points("rollout/tokens_per_episode")
    lengths = dict(zip(*run.metric_points("episode/length"), strict=True))
    step_tokens = [(x, y) for x, y in zip(tokens_xs, tokens_ys, strict=True) if lengths.get(x)]
    xs = [x for x, _ in step_tokens]
    per_step = Series("tokens", xs, [y / lengths[x] for x, y in step_tokens], "second")
    title = "Sampled tokens per step"
    chart = Chart(title, "tokens", [per_step], y_range=(0.0, None), width=352, height=200)
    section.charts.insert(1, chart)
    return section


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
    section = draw_section(run, read_built_in_sections()["time"])
    layers = [
        Series(part.label, *run.metric_points(part.metric), time_color(index))
        for index, part in enumerate(time_parts(run, added))
    ]
    chart = Chart("Time per step", "seconds", layers, "stacked", form="seconds")
    chart.y_range = (0.0, None)
    section.charts.insert(0, chart)
    return section


# ---- key figures at the top ---------------------------------------------------------------------


@dataclass
class Card:
    """One key figure of the report: label, value and a note below it."""

    label: str
    value: str
    note: str = ""
    tone: str = ""  # good | bad


def key_figure_cards(run: RunData) -> list[Card]:
    """Return the key figures whose metrics ``run`` has logged."""
    added = [figure for contribution in load_contributions() for figure in contribution.key_figures]
    cards = _success_cards(run)
    for figure in insert_entries(KEY_FIGURES, added):
        first_value = run.first_value(figure.metric)
        last_mean = run.last_mean(figure.metric, 3)
        if first_value is not None and last_mean is not None:
            note = f"was {figure.form.format(first_value)} at the start"
            cards.append(Card(figure.label, figure.form.format(last_mean), note))
    seconds = run.last_mean("timing_s/step", 5)
    if seconds is not None:
        total = format_duration(sum(run.metric_points("timing_s/step")[1]))
        cards.append(Card("time per step", f"{seconds:.1f} s", f"{total} in all steps"))
    difference = run.last_mean("training/rollout_probs_diff_mean")
    if difference is not None:
        tone = "bad" if difference > LARGE_MISMATCH else ""
        note = "mean difference of probabilities"
        cards.append(Card("engine against trainer", format_number(difference), note, tone))
    return cards


def _success_cards(run: RunData) -> list[Card]:
    xs, ys = run.metric_points("val/success_rate")
    if not xs:
        # A step has few tasks. Its success rate alone is too noisy for a key figure.
        mean_success_rate = run.last_mean("episode/success_rate", 5)
        if mean_success_rate is None:
            return []
        return [Card("train success", f"{mean_success_rate:.1%}", "mean of the last 5 steps")]
    low, high = run.success_interval(xs[-1])
    note = f"95% interval {low:.1%} to {high:.1%}, step {xs[-1]}"
    result = [Card("held-out success", f"{ys[-1]:.1%}", note)]
    if len(xs) > 1:
        first_low, first_high = run.success_interval(xs[0])
        gain = 100 * (ys[-1] - ys[0])
        note = f"from {ys[0]:.1%} ({first_low:.1%} to {first_high:.1%}) at step {xs[0]}"
        tone = "good" if gain > 0 else "bad"
        result.append(Card("gain over the start", f"{gain:+.1f} pts", note, tone))
    return result


def format_duration(seconds: float) -> str:
    """Format seconds: 45 s, 6 min 40 s, 2 h 05 min."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"
