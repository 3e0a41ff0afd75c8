"""Metrics and charts that a training method adds to console, report and validation.

    rlvcr/report_sections.py ──append(ReportContribution(...))──▶ CONTRIBUTIONS
                                                             │ load_contributions()
              console ◀── metrics ──┬── sections, plots, metrics, step views ──▶ report
                                    └── batch metrics ──▶ validation

The module of the method is imported by name, because ``verl`` does not depend on the method. A
module outside this repository appends when it is imported. Console and report show the entries of
all contributions together, in the order of ``CONTRIBUTIONS``.

Colours are names of the report's style sheet: ``accent`` and ``second``, ``ramp-1`` to ``ramp-4``
(ordered), ``time-0`` to ``time-7`` (unordered).
"""

import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)
METHOD_MODULE = "rlvcr.report_sections"

# (uid of a trajectory, turn number) -> number of an alternative text of this turn -> returns of
# the trajectories that were continued with this text.
Outcomes = Mapping[tuple[str, int], Mapping[int, Sequence[float]]]
ReadOutcomes = Callable[[Path], Outcomes]  # reads a run directory

# (batch, prefix) -> metrics named "<prefix>/..."
BatchMetrics = Callable[["DataProto", str], dict[str, float]]


@dataclass(frozen=True, slots=True)
class ConsoleMetric:
    """A metric in the console output of every training step: ``label`` and values of ``metrics``.

    ``number_format`` is the format of each value. The metric is omitted if one of ``metrics`` was
    not logged.
    """

    label: str
    metrics: tuple[str, ...]
    number_format: str = "{:.3g}"


@dataclass(frozen=True, slots=True)
class HeadlineMetric:
    """A number at the top of the report: the mean of the last three values of ``metric``.

    The first value of ``metric`` is shown below it. ``number_format`` is the format of both
    numbers.
    """

    label: str
    metric: str
    number_format: str = "{:.3g}"


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of a metric over training steps.

    ``smooth`` plots a moving average. ``markers`` adds a dot at each value.
    """

    metric: str
    name: str
    color: str = "accent"
    smooth: bool = False
    markers: bool = False


@dataclass(frozen=True, slots=True)
class CurveFamily:
    """A curve for each metric that begins with ``prefix``, named by the rest of the metric."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart of the report with metrics over training steps.

    ``kind`` is ``line`` or ``stacked``. ``number_format`` is the format of values: ``number``,
    ``percent`` or ``seconds``. ``log`` makes the y axis logarithmic. ``y_range`` is the minimum and
    maximum of the y axis; None means the minimum or maximum of the values. ``width`` and ``height``
    are in pixels. Two charts of width 540 fit side by side, or three of width 352.
    """

    title: str
    y_label: str
    curves: tuple[Curve | CurveFamily, ...]
    kind: str = "line"
    number_format: str = "number"
    log: bool = False
    y_range: tuple[float | None, float | None] = (None, None)
    width: int = 540
    height: int = 230


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """A column of a ``MetricTable``. ``key`` is the last part of its metric names.

    A cell shows the value times ``scale``, formatted with ``number_format``. If metrics ``..._low``
    and ``..._high`` of the same name were logged, the cell also shows this interval in brackets.
    """

    key: str
    title: str
    number_format: str = "{:.1f}"
    scale: float = 1.0

    def format_cell(self, metrics: Mapping[str, float], line: str) -> str:
        """Return the cell of this column for ``line`` = ``<prefix>/<name>``; "" without value."""
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
        return self.number_format.format(self.scale * value)


@dataclass(frozen=True, slots=True)
class MetricTable:
    """A table of all metrics ``<prefix>/<name>/<key>``.

    It has one line per ``<name>`` and one column per entry of ``columns``, which gives the
    ``<key>``. ``head`` is the heading of the first column, which shows the names.
    """

    title: str
    prefix: str
    head: str
    columns: tuple[MetricColumn, ...]

    def line_names(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the names of the table's lines, in the order of ``metrics``.

        A line has metrics ``<prefix>/<name>/<column key>``, for example ``val/sums/success``.
        """
        prefix = f"{self.prefix}/"
        column_keys = {column.key for column in self.columns}
        name_and_key_parts = [
            key.removeprefix(prefix).rpartition("/") for key in metrics if key.startswith(prefix)
        ]
        return list(
            dict.fromkeys(name for name, _, key in name_and_key_parts if key in column_keys)
        )

    def line_cells(self, metrics: Mapping[str, float], name: str) -> list[str]:
        """Return the texts of the line for ``name``: the name, then a cell per column."""
        line = f"{self.prefix}/{name}"
        return [
            name.replace("_", " "),
            *(column.format_cell(metrics, line) for column in self.columns),
        ]


@dataclass(frozen=True, slots=True)
class Scatter:
    """A chart with one point per line of the metric table ``table``.

    ``x`` and ``y`` are the keys of the metrics on the two axes. Error bars are drawn if the metrics
    have logged intervals. ``colors`` are pairs (name of a line, colour). Points without an entry in
    ``colors`` have the default colour.
    """

    title: str
    table: MetricTable
    x: str
    y: str
    x_label: str
    y_label: str
    colors: tuple[tuple[str, str], ...] = ()
    number_format: str = "number"
    width: int = 1120
    height: int = 330


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A section of the report: title, introductory sentence ``lead``, charts, then tables.

    ``columns`` is the number of charts per row.
    """

    title: str
    lead: str
    plots: tuple[Plot | Scatter, ...]
    columns: int = 2
    tables: tuple[MetricTable, ...] = ()


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of numbers in a table that lists alternatives to a part of a turn.

    Each alternative is a dict. ``key`` is the key of its number, ``number_format`` the number's
    format, and ``hint`` the tooltip of the column title. ``highlights_largest`` highlights the
    largest number.
    """

    key: str
    title: str
    number_format: str = "{}"
    hint: str = ""
    highlights_largest: bool = False


@dataclass(frozen=True, slots=True)
class AlternativesView:
    """A table below a turn of the report: alternatives to a part of the turn.

    The turn's record has the list of alternatives under ``key``; each alternative is a dict.
    ``badge_key``, ``text`` and ``chosen_key`` are keys of this dict. The value of ``badge_key`` is
    a number from 1 to 4, by which the table is sorted. That of ``chosen_key`` is true for the text
    that the agent used. ``note`` is a pair: a key of the turn's record, and a sentence with a
    placeholder for its value. ``outcomes`` reads the returns of trajectories that were continued
    with one of the alternatives.
    """

    key: str
    badge_key: str
    text: str
    chosen_key: str
    columns: tuple[NumberColumn, ...]
    note: tuple[str, str]
    outcomes: ReadOutcomes | None = None


@dataclass(frozen=True, slots=True)
class TurnView:
    """Additions to the display of a turn in the report (observation, action and advantage).

    ``badge_key`` and ``flags`` are keys of the turn's record. The value of ``badge_key``, a number
    from 1 to 4, is shown as a coloured label. The values of ``flags`` are shown as warnings.
    ``lead`` is a sentence above the list of episodes.
    """

    badge_key: str | None = None
    flags: tuple[str, ...] = ()
    alternatives: AlternativesView | None = None
    lead: str = ""


@dataclass(frozen=True, slots=True)
class ReportContribution:
    """All additions of the method or environment ``name`` to console, report and validation.

    ``health_plots`` are charts of the section Health. ``turn_view`` adds to the display of turns.
    ``batch_metrics`` computes metrics of a validation batch.
    """

    name: str
    console_metrics: tuple[ConsoleMetric, ...] = ()
    headline_metrics: tuple[HeadlineMetric, ...] = ()
    sections: tuple[ReportSection, ...] = ()
    health_plots: tuple[Plot, ...] = ()
    turn_view: TurnView | None = None
    batch_metrics: BatchMetrics | None = None


# Contributing modules append their ReportContribution when they are imported.
CONTRIBUTIONS: list[ReportContribution] = []


def list_data_sources(metric_names: Iterable[str]) -> list[str]:
    """Return the data sources with validation metrics among ``metric_names``, in their order.

    Their names may contain slashes: ``val/openai/gsm8k/success_rate`` is a metric of the source
    ``openai/gsm8k``. Other metrics may end in ``success_rate`` too, but only a source has an
    ``episode_reward`` next to it.
    """
    unique_names = dict.fromkeys(metric_names)
    pattern = re.compile("val/(.+)/success_rate")
    sources = [match[1] for name in unique_names if (match := pattern.fullmatch(name))]
    return [source for source in sources if f"val/{source}/episode_reward" in unique_names]


@functools.cache
def load_contributions() -> list[ReportContribution]:
    """Import the module of the training method once; return all additions to console and report.

    If the import fails, log a warning and continue without its contribution.
    """
    try:
        importlib.import_module(METHOD_MODULE)
    except Exception:  # catch every error: a missing report section must not end the run
        logger.warning("the report sections of %s cannot be loaded", METHOD_MODULE, exc_info=True)
    return CONTRIBUTIONS


def compute_contributed_metrics(batch: "DataProto", prefix: str) -> dict[str, float]:
    """Compute the metrics ``<prefix>/...`` of ``batch`` that methods and environments add."""
    metrics: dict[str, float] = {}
    for contribution in load_contributions():
        if contribution.batch_metrics is not None:
            metrics |= contribution.batch_metrics(batch, prefix)
    return metrics
