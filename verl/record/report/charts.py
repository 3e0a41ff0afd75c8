"""Charts as inline SVG: lines with bands, stacked areas, and points of one metric against another.

Colours are classes that the page's style sheet defines.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import add
from typing import Any

from markupsafe import Markup, escape

from verl.report_sections import Plot, Scatter

# ---- scales, ticks and number formats -----------------------------------------------------------


def compute_linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` evenly spaced round numbers that cover [low, high].

    0.3 to 9 with 5 ticks: 0, 2.5, 5, 7.5, 10
    """
    if high <= low:
        margin = abs(low) * 0.1  # a single value gets a margin above and below
        low, high = (low - margin, low + margin) if margin else (0.0, 1.0)
    min_distance = (high - low) / max(1, count - 1)
    power_of_ten = 10.0 ** math.floor(math.log10(min_distance))
    # Tick distances are 1, 2, 2.5 or 5 times a power of ten. 0.999 tolerates rounding errors.
    tick_distance = next(
        multiplier * power_of_ten
        for multiplier in (1, 2, 2.5, 5, 10)
        if multiplier * power_of_ten >= min_distance * 0.999
    )
    # 0.3 / 0.1 is 2.9999999999999996: the tolerance keeps that tick.
    first_multiple = math.floor(low / tick_distance + 1e-9)
    last_multiple = math.ceil(high / tick_distance - 1e-9)
    return [round(i * tick_distance, 12) for i in range(first_multiple, last_multiple + 1)]


def compute_log_ticks(low: float, high: float) -> list[float]:
    """Return evenly spaced powers of ten, about six at most, that cover [low, high]."""
    first_exponent = math.floor(math.log10(low) + 1e-9)
    last_exponent = max(math.ceil(math.log10(high) - 1e-9), first_exponent + 1)
    exponent_step = max(1, math.ceil((last_exponent - first_exponent) / 5))
    exponents = range(first_exponent, last_exponent + exponent_step, exponent_step)
    return [10.0**exponent for exponent in exponents]


def compute_step_ticks(low: int, high: int, count: int = 7) -> list[float]:
    """Return integer ticks inside [low, high] for an axis of training steps."""
    ticks = compute_linear_ticks(low, max(high, low + 1), count)
    inner_ticks = [tick for tick in ticks if low <= tick <= high and tick == int(tick)]
    return inner_ticks or [float(low)]


@dataclass(frozen=True)
class Scale:
    """Linear or logarithmic map of the values [low, high] to the pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low = self.low
        high = self.high
        if self.log:
            value = math.log10(max(value, low))  # a value below the axis range is drawn at its end
            low = math.log10(low)
            high = math.log10(high)
        axis_fraction = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + axis_fraction * (self.end - self.start), 2)


def format_number(value: float) -> str:
    """Format a number briefly, for example 12,345, 12.3, 0.012 or 1.2e-7."""
    magnitude = abs(value)
    if value == 0:
        return "0"
    if magnitude >= 10_000_000 or magnitude < 1e-3:
        # Python writes exponents with at least two digits.
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    if magnitude >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


FORMATS: dict[str, Callable[[float], str]] = {
    "number": format_number,
    "percent": lambda value: f"{100 * value:.3g}%",
    "seconds": lambda value: f"{format_number(value)} s",
}


# ---- charts ------------------------------------------------------------------------------------

MAX_POINTS = 400  # maximum number of points drawn per series
LEFT, RIGHT, TOP, BOTTOM = 60, 14, 10, 38  # margins, pixels
PADDING_SHARE = 0.04  # margin on both sides of the points, as a share of their range
# Position on the x axis, as a share of its length, after which labels are drawn left of points.
LABEL_LEFT_FROM = 0.88
POINT_COLUMNS = ("xs", "ys", "low", "high", "x_low", "x_high", "labels")  # fields of Series


@dataclass
class Series:
    """One curve of a chart: values ``ys`` over ``xs`` (training steps, or another metric).

    ``color`` is a colour name of the style sheet. ``low`` and ``high`` bound an interval around
    each value of ``ys``, drawn as an error bar or, with ``band``, as a shaded area. ``x_low`` and
    ``x_high`` bound an interval around each value of ``xs``. ``labels`` are drawn next to the
    points. A click on a point opens the trajectories of its step, of the kind ``trajectory_kind``.
    """

    name: str
    xs: Sequence[float]
    ys: list[float]
    color: str
    low: list[float] | None = None
    high: list[float] | None = None
    markers: bool = False
    faint: bool = False  # True for the raw values of a smoothed line, which the legend omits
    labels: list[str] | None = None
    trajectory_kind: str = "train"
    band: bool = False
    x_low: list[float] | None = None
    x_high: list[float] | None = None

    def limit_points(self) -> "Series":
        """Return a series with every n-th point and the last one, about ``MAX_POINTS`` at most."""
        stride = math.ceil(len(self.xs) / MAX_POINTS)
        if stride <= 1:
            return self
        kept_indices = sorted({*range(0, len(self.xs), stride), len(self.xs) - 1})
        columns = {name: getattr(self, name) for name in POINT_COLUMNS}
        kept_columns = {
            name: [values[i] for i in kept_indices]
            for name, values in columns.items()
            if values is not None
        }
        return replace(self, **kept_columns)


@dataclass
class Chart:
    """One chart of the page: its series, titles, axes and size in pixels."""

    title: str
    y_label: str
    series: list[Series]
    kind: str = "line"  # line, stacked (areas on top of each other), or points
    x_label: str = "training step"  # or the metric on the x axis of points
    number_format: str = "number"  # format of the values, a key of ``FORMATS``
    width: int = 540
    height: int = 230
    log: bool = False
    y_range: tuple[float | None, float | None] = (None, None)

    @classmethod
    def from_declaration(
        cls, declaration: Plot | Scatter, series: list[Series], **chart_fields: Any
    ) -> "Chart":
        """Return a chart of ``series`` with the title, axes and format of ``declaration``."""
        common_names = {field.name for field in fields(cls)}
        common_names &= {field.name for field in fields(declaration)}
        declared_fields = {name: getattr(declaration, name) for name in common_names}
        return cls(series=series, **declared_fields, **chart_fields)

    @property
    def legend_series(self) -> list[Series]:
        """Return the series that the legend lists. A legend with one series is omitted."""
        named_series = [series for series in self.series if not series.faint and not series.labels]
        return named_series if len(named_series) > 1 else []


def smooth_values(values: list[float]) -> list[float]:
    """Return the exponential moving average, with Adam's correction of the start at zero.

    values 1, 3 with weight 0.7: 1, 2.18
    """
    weight = 0.7
    averages = []
    weighted_sum = sum_of_weights = 0.0
    for value in values:
        weighted_sum = weight * weighted_sum + (1 - weight) * value
        sum_of_weights = weight * sum_of_weights + (1 - weight)
        averages.append(weighted_sum / sum_of_weights)
    return averages


def draw_svg(chart: Chart) -> Markup:
    """Return the SVG element of ``chart``."""
    series = [s.limit_points() for s in chart.series if s.xs]
    layers = _stack_series(series) if chart.kind == "stacked" else series
    x, y, x_ticks, y_ticks = _make_scales(chart, layers)
    elements = [*_draw_y_axis(chart, x, y, y_ticks), *_draw_x_axis(chart, x, x_ticks)]
    if chart.kind == "stacked":
        for layer in reversed(layers):  # lower areas are drawn last, over upper ones
            elements += _draw_area(layer, x, y)
    else:
        for layer in layers:
            elements += _draw_line(layer, x, y)
    hover_data = {
        "axis": chart.x_label if chart.kind == "points" else "step",
        "left": x.start,
        "right": x.end,
        "low": x.low,
        "high": x.high,
        "top": TOP,
        "bottom": chart.height - BOTTOM,
        "series": [
            {**_format_hover_texts(s, chart.number_format), "at": [y(value) for value in layer.ys]}
            for s, layer in zip(series, layers, strict=True)
            if not s.faint
        ],
    }
    label = escape(f"{chart.title}: {chart.y_label} by {chart.x_label}")
    return Markup(
        f'<svg viewBox="0 0 {chart.width} {chart.height}" aria-label="{label}" '
        f'data-hover="{escape(json.dumps(hover_data, separators=(",", ":")))}">'
        f"{''.join(elements)}</svg>"
    )


def _format_hover_texts(series: Series, number_format: str) -> dict[str, Any]:
    """Return the texts of a series that the page's script shows at the cursor."""
    format_value = FORMATS[number_format]
    interval_texts = None
    if series.low is not None and series.high is not None:
        bounds = zip(series.low, series.high, strict=True)
        interval_texts = [f"{format_value(low)} to {format_value(high)}" for low, high in bounds]
    value_texts = [format_value(value) for value in series.ys]
    texts = {"name": series.name, "color": series.color, "x": series.xs, "y": value_texts}
    return texts | {"range": interval_texts, "trajectories": series.trajectory_kind}


def _stack_series(series: list[Series]) -> list[Series]:
    """Return the areas of a stacked chart, one per series, in order from bottom to top."""
    xs = sorted({x for one_series in series for x in one_series.xs})
    lower_sums = [0.0] * len(xs)
    layers = []
    for one_series in series:
        y_by_x = dict(zip(one_series.xs, one_series.ys, strict=True))
        one_series.xs = xs
        one_series.ys = [y_by_x.get(x, 0.0) for x in xs]  # 0 if it was not measured at a step
        upper_sums = list(map(add, lower_sums, one_series.ys))
        layers.append(Series(one_series.name, xs, upper_sums, one_series.color, low=lower_sums))
        lower_sums = upper_sums
    return layers


def _make_scales(
    chart: Chart, layers: list[Series]
) -> tuple[Scale, Scale, list[float], list[float]]:
    """Return x scale, y scale, x ticks and y ticks for the values of ``layers``.

    A limit in ``chart.y_range`` replaces the smallest or the largest value.
    """
    y_values: list[float] = []
    x_values: list[float] = []
    for layer in layers:
        y_values += [*layer.ys, *(layer.low or []), *(layer.high or [])]
        x_values += [*layer.xs, *(layer.x_low or []), *(layer.x_high or [])]
    y_values = y_values or [0.0, 1.0]
    x_values = x_values or [0, 1]
    y_low = min(y_values) if chart.y_range[0] is None else chart.y_range[0]
    y_high = max(y_values) if chart.y_range[1] is None else chart.y_range[1]
    if chart.log:
        positive_values = [v for v in y_values if v > 0] or [1.0]
        ticks = compute_log_ticks(min(positive_values), max(positive_values))
    else:
        ticks = compute_linear_ticks(y_low, y_high, max(3, chart.height // 48))
    if chart.y_range[1] is not None:
        # Drop ticks above the declared maximum, for example 120% for a share of at most 1.
        ticks = [tick for tick in ticks if tick <= y_high + 1e-9]
    right_edge = chart.width - RIGHT
    if chart.kind == "points":
        # Pad the range at both ends. Do not go below 0 if no value is negative.
        x_low, x_high = min(x_values), max(x_values)
        padding = PADDING_SHARE * (x_high - x_low)
        x_low, x_high = max(x_low - padding, min(x_low, 0.0)), x_high + padding
        x_ticks = compute_linear_ticks(x_low, x_high, max(4, chart.width // 120))
        x = Scale(x_ticks[0], x_ticks[-1], LEFT, right_edge)
    else:
        x = Scale(min(x_values), max(max(x_values), min(x_values) + 1), LEFT, right_edge)
        x_ticks = compute_step_ticks(int(x.low), int(x.high), max(5, chart.width // 90))
    y_top = ticks[-1] if chart.log else max(ticks[-1], y_high)
    y = Scale(ticks[0], y_top, chart.height - BOTTOM, TOP, chart.log)
    return x, y, x_ticks, ticks


def _draw_y_axis(chart: Chart, x: Scale, y: Scale, ticks: list[float]) -> list[str]:
    """Draw a grid line and a value for every y tick, and the label of the axis."""
    center_y = (TOP + chart.height - BOTTOM) / 2
    elements = []
    for tick in ticks:
        css_class = "zero" if tick == 0 and ticks[0] < 0 else "grid"
        attributes = f'x1="{x.start}" x2="{x.end}" y1="{y(tick)}" y2="{y(tick)}"'
        elements.append(f'<line class="{css_class}" {attributes}/>')
        text = escape(FORMATS[chart.number_format](tick))
        attributes = f'x="{x.start - 7}" y="{y(tick) + 3.5}" text-anchor="end"'
        elements.append(f'<text class="tick" {attributes}>{text}</text>')
    transform = f'transform="rotate(-90 11 {center_y})"'
    attributes = f'x="11" y="{center_y}" {transform} text-anchor="middle"'
    elements.append(f'<text class="label" {attributes}>{escape(chart.y_label)}</text>')
    return elements


def _draw_x_axis(chart: Chart, x: Scale, ticks: list[float]) -> list[str]:
    """Draw the x axis with its ticks and its label."""
    axis_y = chart.height - BOTTOM
    format_tick = FORMATS["number"] if chart.kind == "points" else "{:.0f}".format
    elements = []
    for tick in ticks:
        attributes = f'x1="{x(tick)}" x2="{x(tick)}" y1="{axis_y}" y2="{axis_y + 4}"'
        elements.append(f'<line class="mark" {attributes}/>')
        attributes = f'x="{x(tick)}" y="{axis_y + 16}" text-anchor="middle"'
        elements.append(f'<text class="tick" {attributes}>{format_tick(tick)}</text>')
    elements.append(f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{axis_y}" y2="{axis_y}"/>')
    center_x = (x.start + x.end) / 2
    attributes = f'x="{center_x}" y="{chart.height - 5}" text-anchor="middle"'
    elements.append(f'<text class="label" {attributes}>{escape(chart.x_label)}</text>')
    return elements


def _svg_path(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale) -> str:
    return "L".join(f"{x(a)} {y(b)}" for a, b in zip(xs, ys, strict=True))


def _draw_line(series: Series, x: Scale, y: Scale) -> list[str]:
    elements = []
    color = f"c-{series.color}"
    if series.low is not None and series.high is not None and series.band:
        upper_path = _svg_path(series.xs, series.high, x, y)
        lower_path = _svg_path(series.xs[::-1], series.low[::-1], x, y)
        elements.append(f'<path class="band {color}" d="M{upper_path}L{lower_path}Z"/>')
    else:
        error_bars = _whisker_paths(series, x, y)
        elements += [f'<path class="whisker {color}" d="{error_bar}"/>' for error_bar in error_bars]
    css_class = "faint" if series.faint else "line"
    line_path = _svg_path(series.xs, series.ys, x, y)
    elements.append(f'<path class="{css_class} {color}" d="M{line_path}"/>')
    if series.markers or len(series.xs) == 1:
        for step, value in zip(series.xs, series.ys, strict=True):
            elements.append(f'<circle class="dot {color}" cx="{x(step)}" cy="{y(value)}" r="3.6"/>')
    for step, value, label in zip(series.xs, series.ys, series.labels or (), strict=False):
        point_x = x(step)
        x_attributes = f'x="{point_x + 8}"'
        if point_x > x.start + LABEL_LEFT_FROM * (x.end - x.start):
            x_attributes = f'x="{point_x - 8}" text-anchor="end"'
        attributes = f'{x_attributes} y="{y(value) - 6}"'
        elements.append(f'<text class="tick" {attributes}>{escape(label)}</text>')
    return elements


def _whisker_paths(series: Series, x: Scale, y: Scale) -> Iterator[str]:
    """Yield SVG paths of the vertical error bars, then of the horizontal ones."""
    for step, low, high in zip(series.xs, series.low or (), series.high or (), strict=False):
        point_x, low_y, high_y = x(step), y(low), y(high)
        yield f"M{point_x} {low_y}V{high_y}M{point_x - 4} {low_y}h8M{point_x - 4} {high_y}h8"
    for value, left, right in zip(series.ys, series.x_low or (), series.x_high or (), strict=False):
        point_y, left_x, right_x = y(value), x(left), x(right)
        yield f"M{left_x} {point_y}H{right_x}M{left_x} {point_y - 4}v8M{right_x} {point_y - 4}v8"


def _draw_area(layer: Series, x: Scale, y: Scale) -> list[str]:
    lower_values = layer.low or [0.0] * len(layer.xs)
    if len(layer.xs) == 1:  # draw a single step as a bar across the chart
        high_y = y(layer.ys[0])
        size_attributes = f'width="{x.end - x.start}" height="{y(lower_values[0]) - high_y}"'
        return [
            f'<rect class="area c-{layer.color}" x="{x.start}" y="{high_y}" {size_attributes}/>'
        ]
    upper_path = _svg_path(layer.xs, layer.ys, x, y)
    lower_path = _svg_path(layer.xs[::-1], lower_values[::-1], x, y)
    return [f'<path class="area c-{layer.color}" d="M{upper_path}L{lower_path}Z"/>']
