"""Declarations of the metrics and charts that a method adds to console, report and validation.

    rlvcr/report_sections.py ──append(Contribution(...))──▶ CONTRIBUTIONS
                                                             │ load_contributions()
              console ◀── figures ──┬── sections, plots, key figures, step views ──▶ report
                                    └── batch metrics ──▶ validation

``CONTRIBUTORS`` lists the modules that contribute. They are imported by name, because ``verl`` does
not depend on the method. A module outside this repository appends when it is imported.

Colours are names of the report's style sheet: ``accent`` and ``second``, ``ramp-1`` to ``ramp-4``
(ordered), ``time-0`` to ``time-7`` (unordered). An entry with ``placed_after`` comes after the
entry of that label or title; without such an entry it comes last.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)
CONTRIBUTORS = ("rlvcr.report_sections",)

# (uid of a trajectory, turn number) -> index of an alternative text of that turn -> returns of the
# trajectories that were continued from there with that text. ``ReadOutcomes`` is called with the
# run directory.
Outcomes = Mapping[tuple[str, int], Mapping[int, Sequence[float]]]
ReadOutcomes = Callable[[Path], Outcomes]

# (batch, prefix) -> metrics named "<prefix>/..."
BatchMetrics = Callable[["DataProto", str], dict[str, float]]


class PlacedEntry:
    """Dataclass whose first field is the name to which ``placed_after`` of other entries refers."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]
    placed_after: str | None

    @property
    def name(self) -> str:
        """Return the value of the first field."""
        return getattr(self, self.__match_args__[0])


@dataclass(frozen=True, slots=True)
class ConsoleFigure(PlacedEntry):
    """A part of the console line of every training step: ``label`` and values of ``metrics``.

    ``form`` formats the values in order. A step that lacks one of the metrics lacks the part.
    """

    label: str
    metrics: tuple[str, ...]
    form: str = "{:.3g}"
    placed_after: str | None = None


@dataclass(frozen=True, slots=True)
class KeyFigure(PlacedEntry):
    """A number at the top of the report: mean of a metric's last three values, and first value."""

    label: str
    metric: str
    form: str = "{:.3g}"
    placed_after: str | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over steps; ``smooth`` plots a moving average, ``markers`` a dot per value."""

    metric: str
    name: str
    color: str = "accent"
    smooth: bool = False
    markers: bool = False


@dataclass(frozen=True, slots=True)
class CurveFamily:
    """One curve for every metric that begins with ``prefix``, named by what follows it."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Plot(PlacedEntry):
    """A chart of the report.

    ``kind`` is ``line`` or ``stacked``. ``form`` is the format of values: ``number``, ``percent``
    or ``seconds``. ``log`` makes the y axis logarithmic. If an end of ``y_range`` is None, it is
    the minimum or maximum of the values. ``width`` and ``height`` are in pixels. Two charts of
    width 540 fit side by side, or three of width 352.
    """

    title: str
    y_label: str
    curves: tuple[Curve | CurveFamily, ...]
    kind: str = "line"
    form: str = "number"
    log: bool = False
    y_range: tuple[float | None, float | None] = (None, None)
    width: int = 540
    height: int = 230
    placed_after: str | None = None


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """A column of a ``MetricTable``: metric ``key`` times ``scale``, formatted with ``form``.

    If there are metrics ``<key>_low`` and ``<key>_high``, the interval follows in brackets.
    """

    key: str
    title: str
    form: str = "{:.1f}"
    scale: float = 1.0

    def format_cell(self, metrics: Mapping[str, float], line: str) -> str:
        """Return the text for the line ``<prefix>/<name>``; empty if it has no such metric."""
        value = metrics.get(f"{line}/{self.key}")
        if value is None:
            return ""
        text = self._format_value(value)
        low = metrics.get(f"{line}/{self.key}_low")
        high = metrics.get(f"{line}/{self.key}_high")
        if low is None or high is None:
            return text
        return f"{text} ({self._format_value(low)} to {self._format_value(high)})"

    def _format_value(self, value: float) -> str:
        return self.form.format(self.scale * value)


@dataclass(frozen=True, slots=True)
class MetricTable:
    """A table of metrics ``<prefix>/<name>/<key>``: one line per name, one column per ``columns``.

    ``head`` is the heading of the column of names.
    """

    title: str
    prefix: str
    head: str
    columns: tuple[MetricColumn, ...]

    def line_names(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the names that have a metric for any column, in the order of ``metrics``."""
        prefix = f"{self.prefix}/"
        columns = {column.key for column in self.columns}
        key_parts = [
            key.removeprefix(prefix).rpartition("/") for key in metrics if key.startswith(prefix)
        ]
        return list(dict.fromkeys(name for name, _, key in key_parts if key in columns))

    def line_cells(self, metrics: Mapping[str, float], name: str) -> list[str]:
        """Return the cells of the line of ``name``, with the name first."""
        line = f"{self.prefix}/{name}"
        return [
            name.replace("_", " "),
            *(column.format_cell(metrics, line) for column in self.columns),
        ]


@dataclass(frozen=True, slots=True)
class Scatter(PlacedEntry):
    """A chart with one point for every line of ``table``: metric ``y`` over metric ``x``.

    Intervals are drawn if there are any. ``colors`` are pairs (name of a line, colour); other
    points have the default colour.
    """

    title: str
    table: MetricTable
    x: str
    y: str
    x_label: str
    y_label: str
    colors: tuple[tuple[str, str], ...] = ()
    form: str = "number"
    width: int = 1120
    height: int = 330
    placed_after: str | None = None


@dataclass(frozen=True, slots=True)
class ReportSection(PlacedEntry):
    """A section of the report: title, ``lead`` sentence, charts in ``columns`` columns, tables."""

    title: str
    lead: str
    plots: tuple[Plot | Scatter, ...]
    columns: int = 2
    placed_after: str | None = None
    tables: tuple[MetricTable, ...] = ()


@dataclass(frozen=True, slots=True)
class TimePart(PlacedEntry):
    """A timed part of a training step; ``within`` is the metric of the part that includes it."""

    metric: str
    label: str
    within: str | None = None
    placed_after: str | None = None


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of an ``AlternativesView``; ``best`` highlights its largest number."""

    key: str
    title: str
    form: str = "{}"
    hint: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class AlternativesView:
    """A table below a turn of the report, with alternative texts for a part of the turn.

    The turn's record has a list of dictionaries under ``key``, one for each alternative. ``badge``
    (a number from 1 to 4 that orders them), ``text`` and ``chosen`` (true for the text that the
    agent used) are keys of these. ``note`` is a key of the record and a sentence with a placeholder
    for its value. ``outcomes`` reads the returns of trajectories that were continued with an
    alternative.
    """

    key: str
    badge: str
    text: str
    chosen: str
    columns: tuple[NumberColumn, ...]
    note: tuple[str, str]
    outcomes: ReadOutcomes | None = None


@dataclass(frozen=True, slots=True)
class StepView:
    """Additions to the report's view of a turn, which shows observation, action and advantage.

    ``badge`` is a key of the turn's record with a number from 1 to 4, shown as a coloured label.
    The values of ``flags`` are shown as warnings. ``lead`` is a sentence above the episodes.
    """

    badge: str | None = None
    flags: tuple[str, ...] = ()
    alternatives: AlternativesView | None = None
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Contribution:
    """All additions of the method or environment ``name`` to console, report and validation.

    ``plots`` are pairs (title of an existing section, chart to append to it).
    """

    name: str
    console: tuple[ConsoleFigure, ...] = ()
    key_figures: tuple[KeyFigure, ...] = ()
    sections: tuple[ReportSection, ...] = ()
    plots: tuple[tuple[str, Plot], ...] = ()
    time_parts: tuple[TimePart, ...] = ()
    steps: StepView | None = None
    batch_metrics: BatchMetrics | None = None


# The modules of CONTRIBUTORS append to it, and so may any other module.
CONTRIBUTIONS: list[Contribution] = []


def load_contributions() -> list[Contribution]:
    """Import the modules of ``CONTRIBUTORS`` and return ``CONTRIBUTIONS``."""
    import_contributors()
    return CONTRIBUTIONS


@functools.cache
def import_contributors() -> None:
    """Import ``CONTRIBUTORS`` once; warn about a module that fails, whose figures are absent."""
    for module in CONTRIBUTORS:
        try:
            importlib.import_module(module)
        except Exception:  # a missing report section must not end the run
            logger.warning("the report sections of %s cannot be loaded", module, exc_info=True)


P = TypeVar("P", bound=PlacedEntry)


def insert_entries(entries: Sequence[P], added: Iterable[P]) -> list[P]:
    """Return ``entries`` in order. Insert each of ``added`` after the entry it names, or last."""
    arranged = list(entries)
    for item in added:
        # Collect the names again for each item: it may follow another added item.
        names = [entry.name for entry in arranged]
        position = (
            names.index(item.placed_after) + 1 if item.placed_after in names else len(arranged)
        )
        arranged.insert(position, item)
    return arranged


def compute_contributed_metrics(batch: "DataProto", prefix: str) -> dict[str, float]:
    """Return the metrics of ``batch`` from all contributions, named ``<prefix>/...``."""
    metrics: dict[str, float] = {}
    for contribution in load_contributions():
        if contribution.batch_metrics is not None:
            metrics |= contribution.batch_metrics(batch, prefix)
    return metrics
