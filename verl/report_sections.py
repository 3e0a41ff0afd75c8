"""Declarations of what a method or an environment adds to console, report and validation.

    rlvcr/report_sections.py ──append(Contribution(...))──▶ CONTRIBUTIONS
                                                             │ contributions()
              console ◀── figures ──┬── sections, plots, key figures, step views ──▶ report
                                    └── batch metrics ──▶ validation

``CONTRIBUTORS`` lists the modules that contribute. They are imported by name, because ``verl`` does
not depend on the method. A module outside this repository appends when it is imported.

Colours are names of the report's style sheet: ``accent`` and ``second``, ``ramp-1`` to ``ramp-4``
(four in an order), ``time-0`` to ``time-7`` (eight without one). Whatever has ``after`` stands
behind what has that name (a label or a title), and last where there is none.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)
CONTRIBUTORS = ("rlvcr.report_sections",)

# directory of a run -> (trajectory, step) -> number of an alternative -> returns of the plays that
# went on from that step with it
Outcomes = Mapping[tuple[str, int], Mapping[int, Sequence[float]]]
ReadOutcomes = Callable[[Path], Outcomes]

# (batch, prefix) -> metrics named "<prefix>/..."
BatchMetrics = Callable[["DataProto", str], dict[str, float]]


class NamedByFirstField:
    """Dataclass whose name, to which ``after`` of other entries refers, is its first field."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str:
        """Value of the first field."""
        return getattr(self, self.__match_args__[0])


@dataclass(frozen=True, slots=True)
class ConsoleFigure(NamedByFirstField):
    """A figure that is shown at every step while training runs: ``metrics``, each written as
    ``form`` says; absent where one of them is.
    """

    label: str
    metrics: tuple[str, ...]
    form: str = "{:.3g}"
    after: str | None = None


@dataclass(frozen=True, slots=True)
class KeyFigure(NamedByFirstField):
    """A figure at the top of the report: the mean of a metric's last three values, and what it was
    at the start.
    """

    label: str
    metric: str
    form: str = "{:.3g}"
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over training steps; ``smooth`` takes a moving average, ``markers`` draws a dot for
    every value.
    """

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
class Plot(NamedByFirstField):
    """A chart of the report.

    ``kind`` is ``line`` or ``stacked``, ``form`` says how values are written: ``number``,
    ``percent`` or ``seconds``. ``log`` makes the axis logarithmic. None in ``y_range`` leaves that
    end to the values. ``width`` and ``height`` are pixels; 540 fits two charts beside each other,
    352 three.
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
    after: str | None = None


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """The metric ``key`` of every line of a table, times ``scale`` and written as ``form`` says; in
    brackets its interval, where ``<key>_low`` and ``<key>_high`` are there.
    """

    key: str
    title: str
    form: str = "{:.1f}"
    scale: float = 1.0

    def cell(self, metrics: Mapping[str, float], line: str) -> str:
        """What ``metrics`` hold of the line ``<prefix>/<name>``; empty where there is nothing."""
        value = metrics.get(f"{line}/{self.key}")
        if value is None:
            return ""
        text = self._written(value)
        low = metrics.get(f"{line}/{self.key}_low")
        high = metrics.get(f"{line}/{self.key}_high")
        if low is None or high is None:
            return text
        return f"{text} ({self._written(low)} to {self._written(high)})"

    def _written(self, value: float) -> str:
        return self.form.format(self.scale * value)


@dataclass(frozen=True, slots=True)
class MetricTable:
    """A table of metrics ``<prefix>/<name>/<key>``: a line for every name, a column for some keys.

    ``head`` says what the names are of.
    """

    title: str
    prefix: str
    head: str
    columns: tuple[MetricColumn, ...]

    def lines(self, metrics: Mapping[str, float]) -> list[str]:
        """The names for which there is a column, in the order of ``metrics``."""
        start = f"{self.prefix}/"
        columns = {column.key for column in self.columns}
        found = [
            key.removeprefix(start).rpartition("/") for key in metrics if key.startswith(start)
        ]
        return list(dict.fromkeys(name for name, _, key in found if key in columns))

    def cells(self, metrics: Mapping[str, float], name: str) -> list[str]:
        """The line of ``name``: the name first."""
        line = f"{self.prefix}/{name}"
        return [
            name.replace("_", " "),
            *(column.cell(metrics, line) for column in self.columns),
        ]


@dataclass(frozen=True, slots=True)
class Scatter(NamedByFirstField):
    """A chart with a point for every line of ``table``: its metric ``x`` against ``y``, with the
    intervals of both where there are some.

    ``colors`` are those of lines by name; others have the first colour.
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
    after: str | None = None


@dataclass(frozen=True, slots=True)
class ReportSection(NamedByFirstField):
    """A heading of the report with a sentence, charts below it, ``columns`` of them a row, and
    tables below these.
    """

    title: str
    lead: str
    plots: tuple[Plot | Scatter, ...]
    columns: int = 2
    after: str | None = None
    tables: tuple[MetricTable, ...] = ()


@dataclass(frozen=True, slots=True)
class TimePart(NamedByFirstField):
    """A part of an iteration; ``within`` names the metric of the part that contains it."""

    metric: str
    label: str
    within: str | None = None
    after: str | None = None


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A number in a table of alternatives; ``best`` marks the largest of a table."""

    key: str
    title: str
    form: str = "{}"
    hint: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class AlternativesView:
    """A table below a step: what could have stood in place of a part of it.

    The entries are a list of dictionaries under ``key`` of the step. Of an entry, ``badge`` is a
    number from 1 to 4 by which they are ordered, ``text`` what would have stood there, and
    ``chosen`` whether it did. ``note`` is a key of the step and the sentence its value goes into.
    ``outcomes`` knows what plays earned that went on with an alternative, where some did.
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
    """What the report shows of a step beside observation, action and credit.

    ``badge`` is a key of the step with a number from 1 to 4, ``flags`` are keys with a word that
    warns, ``lead`` is a sentence above the episodes.
    """

    badge: str | None = None
    flags: tuple[str, ...] = ()
    alternatives: AlternativesView | None = None
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Contribution:
    """All that the method or environment ``name`` adds.

    ``plots`` are (title of a section, chart) for sections that are there anyway.
    """

    name: str
    console: tuple[ConsoleFigure, ...] = ()
    key_figures: tuple[KeyFigure, ...] = ()
    sections: tuple[ReportSection, ...] = ()
    plots: tuple[tuple[str, Plot], ...] = ()
    time_parts: tuple[TimePart, ...] = ()
    steps: StepView | None = None
    batch_metrics: BatchMetrics | None = None


# Filled by the modules of CONTRIBUTORS, and by every other module that appends to it.
CONTRIBUTIONS: list[Contribution] = []


def contributions() -> list[Contribution]:
    """Return ``CONTRIBUTIONS``, after the modules of ``CONTRIBUTORS`` were imported."""
    import_contributors()
    return CONTRIBUTIONS


@functools.cache
def import_contributors() -> None:
    """Import the modules of ``CONTRIBUTORS`` once.

    A module that cannot be imported costs its figures and a warning, not the run.
    """
    for module in CONTRIBUTORS:
        try:
            importlib.import_module(module)
        except Exception:  # the tracker boundary
            logger.warning("the report sections of %s cannot be loaded", module, exc_info=True)


class Placed(Protocol):
    """What has a name and says behind which other one it stands."""

    @property
    def name(self) -> str: ...

    @property
    def after(self) -> str | None: ...


P = TypeVar("P", bound=Placed)


def arrange(own: Sequence[P], added: Iterable[P]) -> list[P]:
    """``own`` in order, with each of ``added`` behind the one that it names, or last."""
    arranged = list(own)
    for item in added:
        # Names are read anew for each: an added one may stand behind another added one.
        names = [other.name for other in arranged]
        place = names.index(item.after) + 1 if item.after in names else len(arranged)
        arranged.insert(place, item)
    return arranged


def batch_metrics(batch: "DataProto", prefix: str) -> dict[str, float]:
    """What all contributions measure of ``batch``, under ``prefix``."""
    metrics: dict[str, float] = {}
    for contribution in contributions():
        if contribution.batch_metrics is not None:
            metrics |= contribution.batch_metrics(batch, prefix)
    return metrics
