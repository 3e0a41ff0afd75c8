"""Charts as inline SVG: lines with bands, stacked areas, and points of one measure against another.

Colours are classes that the page's style sheet defines.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from markupsafe import Markup, escape

from verl.record.report.axes import FORMATS, Scale, log_ticks, nice_ticks, step_ticks

MAX_POINTS = 400  # drawn per series
LEFT, RIGHT, TOP, BOTTOM = 60, 14, 10, 38  # margins, pixels
ROOM = 0.04  # of the range of points, beside them
LAST_LABELS = 0.88  # of the axis; the labels of points further right stand before them


@dataclass
class Series:
    """Values over steps, or over another measure.

    ``color`` is the style sheet's name of a colour; ``low``/``high`` draw an interval, as whiskers
    or as a ``band``, ``left``/``right`` one of ``xs``, as whiskers, ``labels`` stand beside the
    points. ``plays`` says of which plays a point over steps tells: ``train`` or ``val``.
    """

    name: str
    xs: Sequence[float]
    ys: list[float]
    color: str
    low: list[float] | None = None
    high: list[float] | None = None
    markers: bool = False
    faint: bool = False  # raw values behind a smoothed line; not in the legend
    labels: list[str] | None = None
    plays: str = "train"
    band: bool = False
    left: list[float] | None = None
    right: list[float] | None = None

    def thinned(self) -> "Series":
        """Every n-th point so that at most ``MAX_POINTS`` remain; the last one always stays."""
        # Rounded up: rounded down, up to twice as many points would remain.
        stride = -(-len(self.xs) // MAX_POINTS)
        if stride <= 1:
            return self
        keep = sorted({*range(0, len(self.xs), stride), len(self.xs) - 1})
        return replace(
            self,
            xs=[self.xs[i] for i in keep],
            ys=[self.ys[i] for i in keep],
            low=None if self.low is None else [self.low[i] for i in keep],
            high=None if self.high is None else [self.high[i] for i in keep],
            left=None if self.left is None else [self.left[i] for i in keep],
            right=None if self.right is None else [self.right[i] for i in keep],
            labels=None if self.labels is None else [self.labels[i] for i in keep],
        )


@dataclass
class Chart:
    """One chart of the page.

    ``kind``: line, stacked, or points, whose axis below is no axis of steps but of what ``x_label``
    says; ``form``: how values are written (see ``axes.FORMATS``).
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
    after: str | None = None

    @property
    def name(self) -> str:
        """What ``after`` refers to."""
        return self.title

    @property
    def legend(self) -> list[Series]:
        """The series that the legend names."""
        # Points with labels say themselves what they are.
        shown = [series for series in self.series if not series.faint and not series.labels]
        return shown if len(shown) > 1 else []


def smoothed(values: list[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average without the bias towards its start."""
    result = []
    total = 0.0
    norm = 0.0  # what total would be for values of 1: it takes the zero start out
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def draw(chart: Chart) -> Markup:
    """The SVG element of ``chart``."""
    series = [s.thinned() for s in chart.series if s.xs]
    layers = _stack(series) if chart.kind == "stacked" else series
    x, y, x_ticks, y_ticks = _scales(chart, layers)
    parts = [*_lines_across(chart, x, y, y_ticks), *_axis(chart, x, x_ticks)]
    if chart.kind == "stacked":
        for layer in reversed(layers):  # the first one lies on top
            parts += _area(layer, x, y)
    else:
        for layer in layers:
            parts += _line(layer, x, y)
    hover = {
        "axis": chart.x_label if chart.kind == "points" else "step",
        "left": x.start,
        "right": x.end,
        "low": x.low,
        "high": x.high,
        "top": TOP,
        "bottom": chart.height - BOTTOM,
        "series": [
            {**_hover(s, chart.form), "at": [y(value) for value in layer.ys]}
            for s, layer in zip(series, layers, strict=True)
            if not s.faint
        ],
    }
    label = escape(f"{chart.title}: {chart.y_label} by {chart.x_label}")
    return Markup(
        f'<svg viewBox="0 0 {chart.width} {chart.height}" aria-label="{label}" '
        f'data-hover="{escape(json.dumps(hover, separators=(",", ":")))}">{"".join(parts)}</svg>'
    )


def _hover(series: Series, form: str) -> dict[str, Any]:
    """What the page's script shows of a series under the cursor."""
    show = FORMATS[form]
    ranges = None
    if series.low is not None and series.high is not None:
        ranges = [
            f"{show(low)} to {show(high)}"
            for low, high in zip(series.low, series.high, strict=True)
        ]
    # As text: the page's script would need the same formats again.
    values = [show(value) for value in series.ys]
    return {
        "name": series.name,
        "color": series.color,
        "x": series.xs,
        "y": values,
        "range": ranges,
        "plays": series.plays,
    }


def _stack(series: list[Series]) -> list[Series]:
    """Layers of a stacked chart: ``ys`` become running sums over the series, ``low`` what lies
    below.
    """
    xs = sorted({x for s in series for x in s.xs})
    columns = [dict(zip(s.xs, s.ys, strict=True)) for s in series]
    sums = [list(accumulate(column.get(x, 0.0) for column in columns)) for x in xs]
    layers = []
    for index, s in enumerate(series):
        top = [total[index] for total in sums]
        below = [total[index - 1] if index else 0.0 for total in sums]
        # Where a part was not measured it took no time: all series get the same steps.
        s.ys = [columns[index].get(x, 0.0) for x in xs]
        s.xs = xs
        layers.append(Series(s.name, xs, top, s.color, low=below))
    return layers


def _scales(chart: Chart, layers: list[Series]) -> tuple[Scale, Scale, list[float], list[float]]:
    """Both axes, and the ticks of each."""
    values: list[float] = []
    steps: list[float] = []
    for layer in layers:
        # Intervals count, for their whiskers must not leave the chart.
        values += [*layer.ys, *(layer.low or []), *(layer.high or [])]
        steps += [*layer.xs, *(layer.left or []), *(layer.right or [])]
    values = values or [0.0, 1.0]
    steps = steps or [0, 1]
    low = min(values) if chart.y_range[0] is None else chart.y_range[0]
    high = max(values) if chart.y_range[1] is None else chart.y_range[1]
    if chart.log:
        positive = [v for v in values if v > 0] or [1.0]
        ticks = log_ticks(min(positive), max(positive))
    else:
        ticks = nice_ticks(low, high, max(3, chart.height // 48))
    if chart.y_range[1] is not None:
        # A bound that was asked for holds: no 120% above a share of 1.
        ticks = [tick for tick in ticks if tick <= high + 1e-9]
    right = chart.width - RIGHT
    if chart.kind == "points":
        x_ticks = _ticks_around(min(steps), max(steps), max(4, chart.width // 120))
        x = Scale(x_ticks[0], x_ticks[-1], LEFT, right)
    else:
        # A single step needs an axis with a length, too.
        x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, right)
        x_ticks = step_ticks(int(x.low), int(x.high), max(5, chart.width // 90))
    # Without the ticks beyond the bound, values can reach above the last one.
    highest = ticks[-1] if chart.log else max(ticks[-1], high)
    y = Scale(ticks[0], highest, chart.height - BOTTOM, TOP, chart.log)
    return x, y, x_ticks, ticks


def _ticks_around(low: float, high: float, count: int) -> list[float]:
    """Ticks of an axis on whose ends no point lies; what cannot be negative gets none below 0."""
    room = ROOM * (high - low)
    return nice_ticks(max(low - room, min(low, 0.0)), high + room, count)


def _lines_across(chart: Chart, x: Scale, y: Scale, ticks: list[float]) -> list[str]:
    """A line and a value for every tick, and what the values are."""
    middle = (TOP + chart.height - BOTTOM) / 2
    parts = []
    for tick in ticks:
        css = "zero" if tick == 0 and ticks[0] < 0 else "grid"
        parts.append(
            f'<line class="{css}" x1="{x.start}" x2="{x.end}" y1="{y(tick)}" y2="{y(tick)}"/>'
        )
        text = escape(FORMATS[chart.form](tick))
        place = f'x="{x.start - 7}" y="{y(tick) + 3.5}" text-anchor="end"'
        parts.append(f'<text class="tick" {place}>{text}</text>')
    place = f'x="11" y="{middle}" transform="rotate(-90 11 {middle})"'
    parts.append(f'<text class="label" {place} text-anchor="middle">{escape(chart.y_label)}</text>')
    return parts


def _axis(chart: Chart, x: Scale, ticks: list[float]) -> list[str]:
    """The axis at the bottom: of training steps, or of what the points are drawn over."""
    bottom = chart.height - BOTTOM
    show = FORMATS["number"] if chart.kind == "points" else "{:.0f}".format
    parts = []
    for tick in ticks:
        parts.append(
            f'<line class="mark" x1="{x(tick)}" x2="{x(tick)}" y1="{bottom}" y2="{bottom + 4}"/>'
        )
        place = f'x="{x(tick)}" y="{bottom + 16}" text-anchor="middle"'
        parts.append(f'<text class="tick" {place}>{show(tick)}</text>')
    parts.append(f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{bottom}" y2="{bottom}"/>')
    center = (x.start + x.end) / 2
    place = f'x="{center}" y="{chart.height - 5}" text-anchor="middle"'
    parts.append(f'<text class="label" {place}>{escape(chart.x_label)}</text>')
    return parts


def _path(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale) -> str:
    return "L".join(f"{x(a)} {y(b)}" for a, b in zip(xs, ys, strict=True))


def _line(series: Series, x: Scale, y: Scale) -> list[str]:
    parts = []
    color = f"c-{series.color}"
    if series.low is not None and series.high is not None and series.band:
        above = _path(series.xs, series.high, x, y)
        below = _path(series.xs[::-1], series.low[::-1], x, y)
        parts.append(f'<path class="band {color}" d="M{above}L{below}Z"/>')
    else:
        whiskers = [*_upright(series, x, y), *_sideways(series, x, y)]
        parts += [f'<path class="whisker {color}" d="{whisker}"/>' for whisker in whiskers]
    css = "faint" if series.faint else "line"
    parts.append(f'<path class="{css} {color}" d="M{_path(series.xs, series.ys, x, y)}"/>')
    if series.markers or len(series.xs) == 1:
        for step, value in zip(series.xs, series.ys, strict=True):
            parts.append(f'<circle class="dot {color}" cx="{x(step)}" cy="{y(value)}" r="3.6"/>')
    for step, value, label in zip(series.xs, series.ys, series.labels or (), strict=False):
        at = x(step)
        before = at > x.start + LAST_LABELS * (x.end - x.start)
        side = f'x="{at - 8}" text-anchor="end"' if before else f'x="{at + 8}"'
        place = f'{side} y="{y(value) - 6}"'
        parts.append(f'<text class="tick" {place}>{escape(label)}</text>')
    return parts


def _upright(series: Series, x: Scale, y: Scale) -> Iterator[str]:
    """Paths of the intervals of the values."""
    if series.low is None or series.high is None:
        return
    for step, low, high in zip(series.xs, series.low, series.high, strict=True):
        at = x(step)
        bottom = y(low)
        top = y(high)
        yield f"M{at} {bottom}V{top}M{at - 4} {bottom}h8M{at - 4} {top}h8"


def _sideways(series: Series, x: Scale, y: Scale) -> Iterator[str]:
    """Paths of the intervals of what the values are drawn over."""
    if series.left is None or series.right is None:
        return
    for value, left, right in zip(series.ys, series.left, series.right, strict=True):
        at = y(value)
        start = x(left)
        end = x(right)
        yield f"M{start} {at}H{end}M{start} {at - 4}v8M{end} {at - 4}v8"


def _area(layer: Series, x: Scale, y: Scale) -> list[str]:
    floor = layer.low or [0.0] * len(layer.xs)
    if len(layer.xs) == 1:  # one step: a bar across the chart
        low = y(floor[0])
        high = y(layer.ys[0])
        size = f'x="{x.start}" width="{x.end - x.start}" y="{high}" height="{low - high}"'
        return [f'<rect class="area c-{layer.color}" {size}/>']
    top = _path(layer.xs, layer.ys, x, y)
    below = _path(layer.xs[::-1], floor[::-1], x, y)
    return [f'<path class="area c-{layer.color}" d="M{top}L{below}Z"/>']
