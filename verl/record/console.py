"""Console output of a run: a progress bar and a table row per step, or plain log lines."""

import logging
import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl.report_sections import ConsoleFigure, MetricTable, insert_entries, load_contributions
from verl.utils.logging import get_console
from verl.utils.progress import Progress

logger = logging.getLogger(__name__)

MIN_WIDTH = 130  # characters per line of a table that is written to a file
STEP_WIDTH = 100  # maximum number of characters per line of the table of steps
GAP = "  "
# A label may be wrapped at a space and after the slash between two words.
BREAK = re.compile(r" |(?<=\w{3}/)")
FIGURES = (
    ConsoleFigure("held-out success", ("val/success_rate",), "{:.1%}"),
    ConsoleFigure("held-out return", ("val/episode_reward",)),
    ConsoleFigure("train success", ("episode/success_rate",), "{:.1%}"),
    ConsoleFigure("return", ("episode/reward",)),
    ConsoleFigure("tokens/episode", ("rollout/tokens_per_episode",), "{:.0f}"),
    ConsoleFigure("s/step", ("timing_s/step",), "{:.1f}"),
    ConsoleFigure("entropy", ("actor/entropy",), "{:.3f}"),
    ConsoleFigure("loss", ("actor/pg_loss",), "{:+.4f}"),
    ConsoleFigure("grad norm", ("actor/grad_norm",)),
    ConsoleFigure("engine vs trainer", ("training/rollout_probs_diff_mean",), "{:.1e}"),
    # The last figures are dropped on a narrow terminal.
    ConsoleFigure("score", ("critic/score/mean",)),
)


# Label, metric of the failures, metric of the total. Shown if anything failed.
FAILED = (
    ("held-out failed", "val/aborted", "val/trajectories"),
    ("train failed", "rollout/aborted", "rollout/trajectories"),
    ("failed scores", "critic/score/failed", "rollout/trajectories"),
)


def format_figures(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Return the console's numbers as text by label, without figures that lack a metric."""
    added = [figure for contribution in load_contributions() for figure in contribution.console]
    text_by_label = format_failures(metrics)
    for figure in insert_entries(FIGURES, added):
        values = [metrics.get(name) for name in figure.metrics]
        numbers = [float(value) for value in values if value is not None]
        # Show a figure only if all its numbers are there: it would be unclear which one is missing.
        if len(numbers) == len(figure.metrics):
            text_by_label[figure.label] = " ".join(figure.form.format(number) for number in numbers)
    return text_by_label


def format_failures(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Return texts such as "3 of 64" (failed of total) by label. Omit labels without failures."""
    return {
        label: f"{metrics[failed_metric]:.0f} of {metrics.get(every) or 0:.0f}"
        for label, failed_metric, every in FAILED
        if metrics.get(failed_metric)
    }


def build_metric_table(declared: MetricTable, metrics: Mapping[str, float]) -> Table:
    """Return a terminal table with the lines of ``declared`` that ``metrics`` contain."""
    table = Table(box=None, pad_edge=False, title=declared.title, title_justify="left")
    table.add_column(declared.head)
    for column in declared.columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for name in declared.line_names(metrics):
        table.add_row(*declared.line_cells(metrics, name))
    return table


def show_tables(declared: Iterable[MetricTable], metrics: Mapping[str, float]) -> None:
    """Print those of the ``declared`` tables for which ``metrics`` has values."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=MIN_WIDTH)
    for table in declared:
        if table.line_names(metrics):
            console.print(build_metric_table(table, metrics))


class StepTable:
    """Table with one row per step, ``width`` characters wide; last figures are dropped first."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._widths: dict[str, int] = {}
        self._header: list[tuple[str, int]] = []

    def format_step(self, step: int, figures: Mapping[str, str]) -> tuple[list[str], str]:
        """Return the header lines (empty unless the columns changed) and the row of ``step``."""
        columns = self._fit_columns({"step": str(step), **figures})
        header = [] if columns == self._header else _header_lines(columns)
        self._header = columns
        row = {"step": str(step), **figures}
        return header, GAP.join(row[label].rjust(width) for label, width in columns)

    def _fit_columns(self, row: Mapping[str, str]) -> list[tuple[str, int]]:
        columns = []
        remaining_width = self.width + len(GAP)
        for label, value in row.items():
            needed_width = max(map(len, (value, *BREAK.split(label))))
            # A column never shrinks: otherwise the header would be printed repeatedly.
            width = self._widths[label] = max(needed_width, self._widths.get(label, 0))
            remaining_width -= width + len(GAP)
            if remaining_width < 0:
                break
            columns.append((label, width))
        return columns


def _header_lines(columns: Iterable[tuple[str, int]]) -> list[str]:
    """Return the header lines: the labels of ``columns``, one word per line, bottom-aligned."""
    stacks = [reversed(BREAK.split(label)) for label, _ in columns]
    widths = [width for _, width in columns]
    lines = [
        GAP.join(word.rjust(width) for word, width in zip(row, widths, strict=True))
        for row in zip_longest(*stacks, fillvalue="")
    ]
    return lines[::-1]


class TrainingConsole:
    """Progress of a run: a bar and a row per step on a terminal, otherwise a log line per step."""

    def __init__(
        self, total_steps: int | None = None, first_step: int = 0, console: Console | None = None
    ) -> None:
        self.console = console or get_console()
        self._table = StepTable(min(STEP_WIDTH, self.console.width))
        self._progress: Progress | None = None
        if self.console.is_terminal:
            self._progress = Progress(
                "training", total_steps, "steps", first=first_step, console=self.console
            )

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show the metrics of one step."""
        figures = format_figures(metrics)
        if self._progress is None:
            text = ", ".join(f"{label} {value}" for label, value in figures.items())
            logger.info("step %d: %s", step, text)
            return
        self._progress.set_done(step)
        header, row = self._table.format_step(step, figures)
        for line in header:
            self.console.print(Text(line, style="dim"))
        self.console.print(Text(row))

    def close(self) -> None:
        """Remove the progress bar. May be called twice."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
