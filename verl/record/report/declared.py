"""Drawing of the charts and tables that ``charts.yaml`` and contributions declare.

``verl.report_sections`` has the classes of the declarations.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from verl.record.report.charts import Chart, Series, smooth_values
from verl.record.report.run_data import RunData
from verl.report_sections import (
    Curve,
    CurveFamily,
    MetricTable,
    PlacedEntry,
    Plot,
    ReportSection,
    Scatter,
)

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
