"""Charts as inline SVG: lines with bands, stacked areas, and points of one metric against another.

Colours are classes that the page's style sheet defines.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

from markupsafe import Markup, escape

from verl.report_sections import PlacedEntry, Plot, Scatter

# ---- scales, ticks and number formats -----------------------------------------------------------


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers, from at or below ``low`` to at or above ``high``."""
    if high <= low:
        margin = abs(low) * 0.1  # a single value gets a margin above and below
        low, high = (low - margin, low + margin) if margin else (0.0, 1.0)
    min_distance = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(min_distance))
    # Tick distances are 1, 2, 2.5 or 5 times a power of ten. 0.999 tolerates rounding errors.
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= min_distance * 0.999)
    # 0.3 / 0.1 is 2.9999999999999996: the tolerance keeps that tick.
    first_multiple = math.floor(low / step + 1e-9)
    last_multiple = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first_multiple, last_multiple + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return about six powers of ten or fewer that cover [low, high]."""
    first_power = math.floor(math.log10(low) + 1e-9)
    # At least one decade: otherwise the axis would have no length.
    last_power = max(math.ceil(math.log10(high) - 1e-9), first_power + 1)
    stride = max(1, math.ceil((last_power - first_power) / 5))
    return [10.0**power for power in range(first_power, last_power + stride, stride)]


def step_ticks(low: int, high: int, count: int = 7) -> list[float]:
    """Return integer ticks inside [low, high] for an axis of training steps."""
    ticks = [
        t for t in nice_ticks(low, max(high, low + 1), count) if low <= t <= high and t == int(t)
    ]
    return ticks or [float(low)]


@dataclass(frozen=True)
class Scale:
    """Linear or logarithmic map from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low_end = self.low
        high_end = self.high
        if self.log:
            value = math.log10(max(value, low_end))  # values below the axis are drawn on it
            low_end = math.log10(low_end)
            high_end = math.log10(high_end)
        axis_fraction = (value - low_end) / (high_end - low_end) if high_end > low_end else 0.5
        return round(self.start + axis_fraction * (self.end - self.start), 2)


def format_number(value: float) -> str:
    """Format a number briefly, for example 12,345, 12.3, 0.012 or 1.2e-7."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 10_000_000 or size < 1e-3:
        # Python writes exponents with at least two digits.
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


FORMATS: dict[str, Callable[[float], str]] = {
    "number": format_number,
    "percent": lambda value: f"{100 * value:.3g}%",
    "seconds": lambda value: f"{format_number(value)} s",
}


# ---- charts ------------------------------------------------------------------------------------

MAX_POINTS = 400  # drawn per series
LEFT, RIGHT, TOP, BOTTOM = 60, 14, 10, 38  # margins, pixels
PADDING = 0.04  # margin on both sides of the points, as a share of their range
LABEL_LEFT_FROM = 0.88  # share of the axis from which labels are drawn left of their points


# Fields of Series that have one value per point, or are None.
POINT_COLUMNS = ("xs", "ys", "low", "high", "left", "right", "labels")


@dataclass
class Series:
    """One curve of a chart: values ``ys`` over ``xs`` (training steps, or another metric).

    ``color`` is a colour name of the style sheet. ``low`` and ``high`` are an interval of the
    values, drawn as whiskers or as a ``band``. ``left`` and ``right`` are an interval of ``xs``.
    ``labels`` are drawn next to the points. ``trajectory_kind`` (``train`` or ``val``) names the
    trajectories that a click on a point opens.
    """

    name: str
    xs: Sequence[float]
    ys: list[float]
    color: str
    low: list[float] | None = None
    high: list[float] | None = None
    markers: bool = False
    faint: bool = False  # raw values of a smoothed line; not in the legend
    labels: list[str] | None = None
    trajectory_kind: str = "train"
    band: bool = False
    left: list[float] | None = None
    right: list[float] | None = None

    def limit_points(self) -> "Series":
        """Keep every n-th point and the last one: at most about ``MAX_POINTS`` in total."""
        # Round up: rounding down would keep up to twice as many points.
        stride = -(-len(self.xs) // MAX_POINTS)
        if stride <= 1:
            return self
        keep = sorted({*range(0, len(self.xs), stride), len(self.xs) - 1})
        columns = {name: getattr(self, name) for name in POINT_COLUMNS}
        return replace(
            self,
            **{
                name: [values[i] for i in keep]
                for name, values in columns.items()
                if values is not None
            },
        )


@dataclass
class Chart(PlacedEntry):
    """One chart of the page.

    ``kind`` is line, stacked or points (whose x axis is another metric, ``x_label``). ``form`` is
    the number format of the values (see ``FORMATS``).
    """

    title: str
    y_label: str
    series: list[Series]
    kind: str = "line"
    x_label: str = "training step"
    form: str = "number"
    width: int = 540
    height: int = 230
    log: bool = False
    y_range: tuple[float | None, float | None] = (None, None)
    placed_after: str | None = None

    @classmethod
    def from_plan(cls, plan: Plot | Scatter, series: list[Series], **values: Any) -> "Chart":
        """Return the chart that ``plan`` declares; ``values`` are fields that ``plan`` lacks."""
        names = {field.name for field in fields(cls)} & {field.name for field in fields(plan)}
        return cls(series=series, **{name: getattr(plan, name) for name in names}, **values)

    @property
    def legend_series(self) -> list[Series]:
        """Return the series that the legend names; none if there is only one."""
        # Series with labels at their points need no legend.
        named_series = [series for series in self.series if not series.faint and not series.labels]
        return named_series if len(named_series) > 1 else []


def smooth_values(values: list[float], weight: float = 0.7) -> list[float]:
    """Return the exponential moving average, corrected for the bias of its zero start."""
    result = []
    total = 0.0
    norm = 0.0  # average of a series of ones: dividing by it removes the bias
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def draw_svg(chart: Chart) -> Markup:
    """Return the SVG element of ``chart``."""
    series = [s.limit_points() for s in chart.series if s.xs]
    layers = _stack_series(series) if chart.kind == "stacked" else series
    x, y, x_ticks, y_ticks = _make_scales(chart, layers)
    tags = [*_draw_y_axis(chart, x, y, y_ticks), *_draw_x_axis(chart, x, x_ticks)]
    if chart.kind == "stacked":
        for layer in reversed(layers):  # the first one lies on top
            tags += _draw_area(layer, x, y)
    else:
        for layer in layers:
            tags += _draw_line(layer, x, y)
    hover = {
        "axis": chart.x_label if chart.kind == "points" else "step",
        "left": x.start,
        "right": x.end,
        "low": x.low,
        "high": x.high,
        "top": TOP,
        "bottom": chart.height - BOTTOM,
        "series": [
            {**_hover_values(s, chart.form), "at": [y(value) for value in layer.ys]}
            for s, layer in zip(series, layers, strict=True)
            if not s.faint
        ],
    }
    label = escape(f"{chart.title}: {chart.y_label} by {chart.x_label}")
    return Markup(
        f'<svg viewBox="0 0 {chart.width} {chart.height}" aria-label="{label}" '
        f'data-hover="{escape(json.dumps(hover, separators=(",", ":")))}">{"".join(tags)}</svg>'
    )


def _hover_values(series: Series, form: str) -> dict[str, Any]:
    """Return the values of a series that the page's script shows at the cursor."""
    show = FORMATS[form]
    ranges = None
    if series.low is not None and series.high is not None:
        ranges = [
            f"{show(low)} to {show(high)}"
            for low, high in zip(series.low, series.high, strict=True)
        ]
    # Formatted here, because the page's script would otherwise have to repeat the formats.
    values = [show(value) for value in series.ys]
    texts = {"name": series.name, "color": series.color, "x": series.xs, "y": values}
    return texts | {"range": ranges, "plays": series.trajectory_kind}


def _stack_series(series: list[Series]) -> list[Series]:
    """Return the layers of a stacked chart.

    ``ys`` are running sums over the series, ``low`` is the sum of the series below.
    """
    xs = sorted({x for s in series for x in s.xs})
    columns = [dict(zip(s.xs, s.ys, strict=True)) for s in series]
    sums = [list(accumulate(column.get(x, 0.0) for column in columns)) for x in xs]
    layers = []
    for index, s in enumerate(series):
        upper_sums = [total[index] for total in sums]
        lower_sums = [total[index - 1] if index else 0.0 for total in sums]
        # All series get the same steps. A part that was not measured counts as 0.
        s.ys = [columns[index].get(x, 0.0) for x in xs]
        s.xs = xs
        layers.append(Series(s.name, xs, upper_sums, s.color, low=lower_sums))
    return layers


def _make_scales(
    chart: Chart, layers: list[Series]
) -> tuple[Scale, Scale, list[float], list[float]]:
    """Return the x scale, the y scale, and the ticks of each."""
    values: list[float] = []
    steps: list[float] = []
    for layer in layers:
        # Include the intervals: their whiskers must stay inside the chart.
        values += [*layer.ys, *(layer.low or []), *(layer.high or [])]
        steps += [*layer.xs, *(layer.left or []), *(layer.right or [])]
    values = values or [0.0, 1.0]
    steps = steps or [0, 1]
    y_low = min(values) if chart.y_range[0] is None else chart.y_range[0]
    y_high = max(values) if chart.y_range[1] is None else chart.y_range[1]
    if chart.log:
        positive = [v for v in values if v > 0] or [1.0]
        ticks = log_ticks(min(positive), max(positive))
    else:
        ticks = nice_ticks(y_low, y_high, max(3, chart.height // 48))
    if chart.y_range[1] is not None:
        # Drop ticks above a given bound, for example 120% for a share of at most 1.
        ticks = [tick for tick in ticks if tick <= y_high + 1e-9]
    right_edge = chart.width - RIGHT
    if chart.kind == "points":
        # Ticks with padding at both ends, not below 0 if no value is negative.
        first, last = min(steps), max(steps)
        padding = PADDING * (last - first)
        first, last = max(first - padding, min(first, 0.0)), last + padding
        x_ticks = nice_ticks(first, last, max(4, chart.width // 120))
        x = Scale(x_ticks[0], x_ticks[-1], LEFT, right_edge)
    else:
        # A single step also needs an axis with a length.
        x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, right_edge)
        x_ticks = step_ticks(int(x.low), int(x.high), max(5, chart.width // 90))
    # Values can exceed the last tick, because ticks above the bound were removed.
    highest = ticks[-1] if chart.log else max(ticks[-1], y_high)
    y = Scale(ticks[0], highest, chart.height - BOTTOM, TOP, chart.log)
    return x, y, x_ticks, ticks


def _draw_y_axis(chart: Chart, x: Scale, y: Scale, ticks: list[float]) -> list[str]:
    """Draw a grid line and a value for every y tick, and the label of the axis."""
    center_y = (TOP + chart.height - BOTTOM) / 2
    tags = []
    for tick in ticks:
        css = "zero" if tick == 0 and ticks[0] < 0 else "grid"
        attrs = f'x1="{x.start}" x2="{x.end}" y1="{y(tick)}" y2="{y(tick)}"'
        tags.append(f'<line class="{css}" {attrs}/>')
        text = escape(FORMATS[chart.form](tick))
        attrs = f'x="{x.start - 7}" y="{y(tick) + 3.5}" text-anchor="end"'
        tags.append(f'<text class="tick" {attrs}>{text}</text>')
    attrs = f'x="11" y="{center_y}" transform="rotate(-90 11 {center_y})"'
    tags.append(f'<text class="label" {attrs} text-anchor="middle">{escape(chart.y_label)}</text>')
    return tags


def _draw_x_axis(chart: Chart, x: Scale, ticks: list[float]) -> list[str]:
    """Draw the x axis with its ticks and its label."""
    axis_y = chart.height - BOTTOM
    show = FORMATS["number"] if chart.kind == "points" else "{:.0f}".format
    tags = []
    for tick in ticks:
        attrs = f'x1="{x(tick)}" x2="{x(tick)}" y1="{axis_y}" y2="{axis_y + 4}"'
        tags.append(f'<line class="mark" {attrs}/>')
        attrs = f'x="{x(tick)}" y="{axis_y + 16}" text-anchor="middle"'
        tags.append(f'<text class="tick" {attrs}>{show(tick)}</text>')
    tags.append(f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{axis_y}" y2="{axis_y}"/>')
    center = (x.start + x.end) / 2
    attrs = f'x="{center}" y="{chart.height - 5}" text-anchor="middle"'
    tags.append(f'<text class="label" {attrs}>{escape(chart.x_label)}</text>')
    return tags


def _svg_path(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale) -> str:
    return "L".join(f"{x(a)} {y(b)}" for a, b in zip(xs, ys, strict=True))


def _draw_line(series: Series, x: Scale, y: Scale) -> list[str]:
    tags = []
    color = f"c-{series.color}"
    if series.low is not None and series.high is not None and series.band:
        upper_path = _svg_path(series.xs, series.high, x, y)
        lower_path = _svg_path(series.xs[::-1], series.low[::-1], x, y)
        tags.append(f'<path class="band {color}" d="M{upper_path}L{lower_path}Z"/>')
    else:
        whiskers = _whisker_paths(series, x, y)
        tags += [f'<path class="whisker {color}" d="{whisker}"/>' for whisker in whiskers]
    css = "faint" if series.faint else "line"
    tags.append(f'<path class="{css} {color}" d="M{_svg_path(series.xs, series.ys, x, y)}"/>')
    if series.markers or len(series.xs) == 1:
        for step, value in zip(series.xs, series.ys, strict=True):
            tags.append(f'<circle class="dot {color}" cx="{x(step)}" cy="{y(value)}" r="3.6"/>')
    for step, value, label in zip(series.xs, series.ys, series.labels or (), strict=False):
        at = x(step)
        is_label_left = at > x.start + LABEL_LEFT_FROM * (x.end - x.start)
        x_attrs = f'x="{at - 8}" text-anchor="end"' if is_label_left else f'x="{at + 8}"'
        attrs = f'{x_attrs} y="{y(value) - 6}"'
        tags.append(f'<text class="tick" {attrs}>{escape(label)}</text>')
    return tags


def _whisker_paths(series: Series, x: Scale, y: Scale) -> Iterator[str]:
    """Yield SVG paths of the vertical error bars, then of the horizontal ones."""
    for step, low, high in zip(series.xs, series.low or (), series.high or (), strict=False):
        at, low_y, high_y = x(step), y(low), y(high)
        yield f"M{at} {low_y}V{high_y}M{at - 4} {low_y}h8M{at - 4} {high_y}h8"
    for value, left, right in zip(series.ys, series.left or (), series.right or (), strict=False):
        at, left_x, right_x = y(value), x(left), x(right)
        yield f"M{left_x} {at}H{right_x}M{left_x} {at - 4}v8M{right_x} {at - 4}v8"


def _draw_area(layer: Series, x: Scale, y: Scale) -> list[str]:
    lower_values = layer.low or [0.0] * len(layer.xs)
    if len(layer.xs) == 1:  # one step: a bar across the chart
        low_y = y(lower_values[0])
        high_y = y(layer.ys[0])
        size = f'x="{x.start}" width="{x.end - x.start}" y="{high_y}" height="{low_y - high_y}"'
        return [f'<rect class="area c-{layer.color}" {size}/>']
    upper_path = _svg_path(layer.xs, layer.ys, x, y)
    lower_path = _svg_path(layer.xs[::-1], lower_values[::-1], x, y)
    return [f'<path class="area c-{layer.color}" d="M{upper_path}L{lower_path}Z"/>']
