"""Charts and headline metrics of a report: built-in ones and those that other packages contribute.

A chart without logged metrics is omitted.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from verl.record.report.charts import Chart, Series, format_number, smooth_values
from verl.record.report.run_data import RunData
from verl.report_sections import (
    Curve,
    CurveFamily,
    HeadlineMetric,
    MetricTable,
    Plot,
    ReportSection,
    Scatter,
    list_data_sources,
    load_contributions,
)
from verl.utils.files import read_yaml_table

# ---- drawing of declarations -------------------------------------------------------------------

NUM_TIME_COLORS = 8  # colours time-0 to time-7 of the style sheet, which repeat after 8 curves


@functools.cache
def read_built_in_sections() -> dict[str, ReportSection]:
    """Return the sections of the report that ``charts.yaml`` declares, by key."""
    charts = read_yaml_table(__file__, "charts.yaml")
    return TypeAdapter(dict[str, ReportSection]).validate_python(charts)


@dataclass
class TextTable:
    """Table with text cells: column titles ``head``, and ``lines`` whose first cell is a name."""

    title: str
    head: list[str]
    lines: list[list[str]]


@dataclass
class DrawnSection:
    """Section of the report: title, sentence ``lead``, charts (``columns`` per row) and tables."""

    title: str
    lead: str
    charts: list[Chart] = field(default_factory=list)
    columns: int = 2
    tables: list[TextTable] = field(default_factory=list)


def draw_section(run: RunData, declaration: ReportSection) -> DrawnSection:
    """Draw the declared section of the report: charts and tables of metrics of ``run``."""
    charts = [
        draw_scatter(run, plot) if isinstance(plot, Scatter) else draw_plot(run, plot)
        for plot in declaration.plots
    ]
    tables = [draw_table(run, table) for table in declaration.tables]
    return DrawnSection(
        declaration.title,
        declaration.lead,
        charts,
        declaration.columns,
        [table for table in tables if table.lines],
    )


def draw_table(run: RunData, table: MetricTable) -> TextTable:
    """Fill the declared ``table`` with the last values of its metrics in ``run``."""
    values = run.get_last_metrics(f"{table.prefix}/")
    column_titles = [table.head, *(column.title for column in table.columns)]
    lines = [table.line_cells(values, name) for name in table.line_names(values)]
    return TextTable(table.title, column_titles, lines)


def draw_scatter(run: RunData, scatter: Scatter) -> Chart:
    """Draw a chart with one point for each line of a table of metrics.

    The metrics of ``scatter.table`` are named ``PREFIX/NAME/KEY``, with one line per ``NAME``. The
    keys ``scatter.x`` and ``scatter.y`` select the coordinates. The last logged values are drawn.
    """
    values = run.get_last_metrics(f"{scatter.table.prefix}/")
    names = scatter.table.line_names(values)
    points = [_make_scatter_point(scatter, name, values) for name in names]
    return Chart.from_declaration(scatter, points, kind="points")


def _make_scatter_point(scatter: Scatter, name: str, values: Mapping[str, float]) -> Series:
    """Return a labelled point whose coordinates are two of the metrics ``PREFIX/name/KEY``.

    The keys are ``scatter.x`` and ``scatter.y``. The series is empty if a coordinate is missing.
    """
    metric_prefix = f"{scatter.table.prefix}/{name}"
    label = name.replace("_", " ")
    color = dict(scatter.colors).get(name, "accent")
    point = Series(label, [], [], color, labels=[label])
    x = values.get(f"{metric_prefix}/{scatter.x}")
    y = values.get(f"{metric_prefix}/{scatter.y}")
    if x is not None and y is not None:
        point.xs = [round(x, 2)]
        point.ys = [y]
        point.low = [values.get(f"{metric_prefix}/{scatter.y}_low", y)]
        point.high = [values.get(f"{metric_prefix}/{scatter.y}_high", y)]
        x_low = values.get(f"{metric_prefix}/{scatter.x}_low")
        x_high = values.get(f"{metric_prefix}/{scatter.x}_high")
        if x_low is not None and x_high is not None:
            point.x_low = [x_low]
            point.x_high = [x_high]
    return point


def draw_plot(run: RunData, plot: Plot) -> Chart:
    """Draw the declared chart ``plot``: metrics of ``run`` over training steps."""
    all_series = [series for curve in plot.curves for series in _make_curve_series(run, curve)]
    for series in all_series if plot.log else ():
        # Drop values that are not positive: a logarithmic axis cannot show them.
        pairs = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y > 0]
        series.xs = [x for x, _ in pairs]
        series.ys = [y for _, y in pairs]
    return Chart.from_declaration(plot, all_series)


def _make_curve_series(run: RunData, curve: Curve | CurveFamily) -> list[Series]:
    metric = curve.prefix if isinstance(curve, CurveFamily) else curve.metric
    kind = "val" if metric.startswith("val/") else "train"
    if isinstance(curve, CurveFamily):
        names = [name for name in run.metric_names if name.startswith(curve.prefix)]
        labels = [name.removeprefix(curve.prefix) for name in names]
        return [
            Series(label, *run.metric_points(name), _get_curve_color(index), trajectory_kind=kind)
            for index, (label, name) in enumerate(zip(labels, names, strict=True))
        ]
    xs, ys = run.metric_points(curve.metric)
    if curve.smooth:
        ys = smooth_values(ys)
    return [Series(curve.name, xs, ys, curve.color, markers=curve.markers, trajectory_kind=kind)]


def _get_curve_color(index: int) -> str:
    return f"time-{index % NUM_TIME_COLORS}"


# ---- sections of the report --------------------------------------------------------------------

FULL_WIDTH = 1120  # pixels of a chart that fills a row
SOURCE_COLORS = ("accent", "second", "ramp-3", "ramp-4", "ramp-2", "ramp-1")

LARGE_MISMATCH = 2e-2  # mean difference of engine and trainer probabilities that is shown as bad
TOKENS_METRIC = HeadlineMetric("tokens per episode", "rollout/tokens_per_episode", "{:.0f}")


@dataclass(frozen=True, slots=True)
class TimePart:
    """A part of a training step, whose seconds (``metric``) the report shows."""

    metric: str
    label: str
    within: str | None = None  # metric of the part that includes this one


ROLLOUT_TIME = "timing_s/gen"
TIME_PARTS = (  # in the order in which they occur in a training step
    TimePart(ROLLOUT_TIME, "rollout"),
    TimePart("timing_s/gen_engine", "generation", within=ROLLOUT_TIME),
    TimePart("timing_s/gen_env", "environments", within=ROLLOUT_TIME),
    TimePart("timing_s/alternatives", "alternatives", within=ROLLOUT_TIME),
    TimePart("timing_s/pack", "building rows", within=ROLLOUT_TIME),
    TimePart("timing_s/scoring", "scoring"),
    TimePart("timing_s/old_log_prob", "log-probs"),
    TimePart("timing_s/ref", "reference log-probs"),
    TimePart("timing_s/values", "values"),
    TimePart("timing_s/reward", "rewards"),
    TimePart("timing_s/adv", "advantages"),
    TimePart("timing_s/update_critic", "critic update"),
    TimePart("timing_s/update_actor", "policy update"),
    TimePart("timing_s/update_weights", "weight sync"),
)


def draw_report_sections(run: RunData) -> list[DrawnSection]:
    """Return the sections of the report about ``run`` that have at least one chart or table."""
    contributions = load_contributions()
    declarations = read_built_in_sections()
    health_section = draw_section(run, declarations["health"])
    health_section.charts[1:1] = [
        draw_plot(run, plot) for contribution in contributions for plot in contribution.health_plots
    ]
    sections = [
        draw_success_section(run),
        *(
            draw_section(run, declaration)
            for contribution in contributions
            for declaration in contribution.sections
        ),
        draw_token_usage_section(run),
        draw_section(run, declarations["optimisation"]),
        draw_time_section(run),
        health_section,
    ]
    for section in sections:
        for chart in section.charts:
            chart.series = [series for series in chart.series if series.xs]
        section.charts = [chart for chart in section.charts if chart.series]
    return [section for section in sections if section.charts or section.tables]


def draw_success_section(run: RunData) -> DrawnSection:
    """Return the section with success rates on held-out tasks (with intervals) and in training."""
    section = draw_section(run, read_built_in_sections()["success"])
    charts = [_draw_success_chart(run)]
    sources = list_data_sources(run.metric_names)
    # With a single data source, the first chart already shows its success rate.
    if len(sources) > 1:
        charts.append(_draw_source_chart(run, sources))
    section.charts = [*charts, *section.charts, _draw_tokens_chart(run)]
    return section


def _draw_success_chart(run: RunData) -> Chart:
    xs, ys = run.metric_points("val/success_rate")
    bounds = [run.success_interval(x) for x in xs]
    name = "held-out tasks, 95% bootstrap interval"
    held_out_curve = Series(name, xs, ys, "accent", markers=True, trajectory_kind="val")
    held_out_curve.low = [low for low, _ in bounds]
    held_out_curve.high = [high for _, high in bounds]
    steps, rates = run.metric_points("episode/success_rate")
    raw_curve = Series("training tasks", steps, rates, "second", faint=True)
    smoothed_curve = Series("training tasks, smoothed", steps, smooth_values(rates), "second")
    max_rate = max([*rates, *held_out_curve.high, 0.0])
    return Chart(
        "Success rate",
        "share of successes",
        # In drawing order: the most important series is on top.
        [raw_curve, smoothed_curve, held_out_curve],
        number_format="percent",
        width=FULL_WIDTH,
        height=330,
        # Above 75% the axis ends at 100%. Below, it ends at the highest value.
        y_range=(0.0, 1.0 if max_rate > 0.75 else None),
    )


def _draw_tokens_chart(run: RunData) -> Chart:
    """Draw held-out success against tokens per episode, one point per validation.

    The chart is empty if there is only one validation.
    """
    tokens_by_step = dict(zip(*run.metric_points("val/tokens_per_episode"), strict=True))
    steps, rates = run.metric_points("val/success_rate")
    pairs = [pair for pair in zip(steps, rates, strict=True) if pair[0] in tokens_by_step]
    points = Series("held-out tasks", [], [], "accent", markers=True)
    if len(pairs) > 1:
        points.xs = [round(tokens_by_step[step], 2) for step, _ in pairs]
        points.ys = [rate for _, rate in pairs]
        bounds = [run.success_interval(step) for step, _ in pairs]
        points.low = [low for low, _ in bounds]
        points.high = [high for _, high in bounds]
        labelled_steps = (pairs[0][0], pairs[-1][0])
        points.labels = [f"step {step}" if step in labelled_steps else "" for step, _ in pairs]
    return Chart(
        "Success against tokens",
        "share of successes",
        [points],
        kind="points",
        x_label="sampled tokens per episode",
        number_format="percent",
        width=FULL_WIDTH,
        height=260,
    )


def _draw_source_chart(run: RunData, sources: Sequence[str]) -> Chart:
    curves = []
    # Draw at most as many sources as there are colours, so that each has a different colour.
    for source, color in zip(sources, SOURCE_COLORS, strict=False):
        curve = Curve(f"val/{source}/success_rate", source, color, markers=True)
        curves += _make_curve_series(run, curve)
    title = "Held-out success by task type"
    return Chart(
        title, "share of successes", curves, number_format="percent", width=FULL_WIDTH, height=260
    )


def draw_token_usage_section(run: RunData) -> DrawnSection:
    section = draw_section(run, read_built_in_sections()["effort"])
    tokens_by_step = dict(zip(*run.metric_points("rollout/tokens_per_episode"), strict=True))
    length_by_step = dict(zip(*run.metric_points("episode/length"), strict=True))
    xs = [step for step in tokens_by_step if length_by_step.get(step)]
    ys = [tokens_by_step[step] / length_by_step[step] for step in xs]
    tokens_per_turn = Series("tokens", xs, ys, "second")
    title = "Sampled tokens per step"
    chart = Chart(title, "tokens", [tokens_per_turn], y_range=(0.0, None), width=352, height=200)
    section.charts.insert(1, chart)
    return section


def select_parts_of_step_time(run: RunData) -> list[TimePart]:
    """Return the parts of a training step whose logged times add up to the time of the step.

    If parts of the rollout (generation, environments, ...) were logged, they replace the rollout.
    """
    logged_parts = [part for part in TIME_PARTS if part.metric in run.metric_names]
    if any(part.metric == "timing_s/gen_engine" for part in logged_parts):
        return [part for part in logged_parts if part.metric != ROLLOUT_TIME]
    return [part for part in logged_parts if part.within is None]


def draw_time_section(run: RunData) -> DrawnSection:
    """Return the section with charts of seconds per training step (by part) and throughput."""
    section = draw_section(run, read_built_in_sections()["time"])
    time_series = [
        Series(part.label, *run.metric_points(part.metric), _get_curve_color(index))
        for index, part in enumerate(select_parts_of_step_time(run))
    ]
    y_range = (0.0, None)
    chart = Chart(
        "Time per step", "seconds", time_series, "stacked", number_format="seconds", y_range=y_range
    )
    section.charts.insert(0, chart)
    return section


# ---- headline metrics at the top ----------------------------------------------------------------


@dataclass
class Card:
    """A headline metric at the top of the report: label, value and a note below the value."""

    label: str
    value: str
    note: str = ""
    tone: str = ""  # good | bad


def make_headline_cards(run: RunData) -> list[Card]:
    """Return a card for each headline metric that ``run`` has logged."""
    contributed_metrics = [
        headline_metric
        for contribution in load_contributions()
        for headline_metric in contribution.headline_metrics
    ]
    cards = _make_success_cards(run)
    for headline_metric in (TOKENS_METRIC, *contributed_metrics):
        first_value = run.first_value(headline_metric.metric)
        last_mean = run.last_mean(headline_metric.metric, 3)
        if first_value is not None and last_mean is not None:
            note = f"was {headline_metric.number_format.format(first_value)} at the start"
            cards.append(
                Card(headline_metric.label, headline_metric.number_format.format(last_mean), note)
            )
    step_seconds = run.last_mean("timing_s/step", 5)
    if step_seconds is not None:
        total_duration = format_duration(sum(run.metric_points("timing_s/step")[1]))
        cards.append(
            Card("time per step", f"{step_seconds:.1f} s", f"{total_duration} in all steps")
        )
    prob_difference = run.last_mean("training/rollout_probs_diff_mean")
    if prob_difference is not None:
        tone = "bad" if prob_difference > LARGE_MISMATCH else ""
        note = "mean difference of probabilities"
        cards.append(Card("engine against trainer", format_number(prob_difference), note, tone))
    return cards


def _make_success_cards(run: RunData) -> list[Card]:
    xs, ys = run.metric_points("val/success_rate")
    if not xs:
        # One step has few tasks, so its success rate is too noisy.
        mean_success_rate = run.last_mean("episode/success_rate", 5)
        if mean_success_rate is None:
            return []
        return [Card("train success", f"{mean_success_rate:.1%}", "mean of the last 5 steps")]
    low, high = run.success_interval(xs[-1])
    note = f"95% interval {low:.1%} to {high:.1%}, step {xs[-1]}"
    cards = [Card("held-out success", f"{ys[-1]:.1%}", note)]
    if len(xs) > 1:
        first_low, first_high = run.success_interval(xs[0])
        gain_percent_points = 100 * (ys[-1] - ys[0])
        note = f"from {ys[0]:.1%} ({first_low:.1%} to {first_high:.1%}) at step {xs[0]}"
        tone = "good" if gain_percent_points > 0 else "bad"
        cards.append(Card("gain over the start", f"{gain_percent_points:+.1f} pts", note, tone))
    return cards


def format_duration(seconds: float) -> str:
    """Format seconds: 45 s, 6 min 40 s, 2 h 05 min."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"
