"""Scales, ticks and number formats of the charts."""

import math
from collections.abc import Callable
from dataclasses import dataclass


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers that cover [low, high].

    The first is at or below ``low``, the last at or above ``high``.
    """
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
