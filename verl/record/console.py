"""Console output of a run: a progress bar and a table row per step, or plain log lines."""

import logging
import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl.report_sections import ConsoleMetric, MetricTable, load_contributions
from verl.utils.logging import escape_control_characters, get_console
from verl.utils.progress import Progress

logger = logging.getLogger(__name__)

FILE_WIDTH = 130  # characters per line of a table that is written to a file
STEP_WIDTH = 100  # maximum number of characters per line of the table of steps
COLUMN_GAP = "  "
# Positions where a column label may be wrapped: at a space, and after the slash between two words.
LABEL_BREAK = re.compile(r" |(?<=\w{3}/)")
# (label, metric that counts failures, metric that counts all), shown only if there were failures
FAILURE_METRICS = (
    ("held-out failed", "val/aborted", "val/trajectories"),
    ("train failed", "rollout/aborted", "rollout/trajectories"),
    ("failed scores", "critic/score/failed", "rollout/trajectories"),
)


def list_console_metrics() -> list[ConsoleMetric]:
    """Return the console metrics in their order, including those that training methods add."""
    return [
        ConsoleMetric("held-out success", ("val/success_rate",), "{:.1%}"),
        ConsoleMetric("held-out return", ("val/episode_reward",)),
        ConsoleMetric("train success", ("episode/success_rate",), "{:.1%}"),
        ConsoleMetric("return", ("episode/reward",)),
        ConsoleMetric("tokens/episode", ("rollout/tokens_per_episode",), "{:.0f}"),
        *(
            console_metric
            for contribution in load_contributions()
            for console_metric in contribution.console_metrics
        ),
        ConsoleMetric("s/step", ("timing_s/step",), "{:.1f}"),
        ConsoleMetric("entropy", ("actor/entropy",), "{:.3f}"),
        ConsoleMetric("loss", ("actor/pg_loss",), "{:+.4f}"),
        ConsoleMetric("grad norm", ("actor/grad_norm",)),
        ConsoleMetric("engine vs trainer", ("training/rollout_probs_diff_mean",), "{:.1e}"),
        ConsoleMetric("score", ("critic/score/mean",)),
    ]


def format_console_metrics(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Return a dict label -> text of the numbers that the console shows for a step.

    A label is omitted if one of its metrics is missing.
    """
    text_by_label = {
        label: f"{metrics[failed_metric]:.0f} of {metrics.get(total_metric) or 0:.0f}"
        for label, failed_metric, total_metric in FAILURE_METRICS
        if metrics.get(failed_metric)
    }
    for console_metric in list_console_metrics():
        values = [metrics.get(name) for name in console_metric.metrics]
        numbers = [float(value) for value in values if value is not None]
        if len(numbers) == len(console_metric.metrics):
            text_by_label[console_metric.label] = " ".join(
                console_metric.number_format.format(number) for number in numbers
            )
    return text_by_label


def build_metric_table(declaration: MetricTable, metrics: Mapping[str, float]) -> Table:
    """Return the terminal table that ``declaration`` describes, filled with ``metrics``.

    Its metrics are named ``PREFIX/NAME/COLUMN``. The table has one line per ``NAME``.
    """
    table = Table(box=None, pad_edge=False, title=declaration.title, title_justify="left")
    table.add_column(declaration.head)
    for column in declaration.columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for name in declaration.line_names(metrics):
        # Names of data sources are texts of the user's files. rich would read "[math]" as markup.
        cells = map(escape_control_characters, declaration.line_cells(metrics, name))
        table.add_row(*map(Text, cells))
    return table


def show_tables(declarations: Iterable[MetricTable], metrics: Mapping[str, float]) -> None:
    """Print each declared table of metrics. Skip a table if ``metrics`` has no value for it."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    for declaration in declarations:
        if declaration.line_names(metrics):
            console.print(build_metric_table(declaration, metrics))


class StepTable:
    """Table of labelled numbers (figures): one row per step, at most ``width`` characters wide.

    Figures that do not fit are omitted, beginning with the last one.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._column_widths: dict[str, int] = {}
        self._last_columns: list[tuple[str, int]] = []

    def format_step(self, step: int, console_metrics: Mapping[str, str]) -> tuple[list[str], str]:
        """Return the header lines (empty unless the columns changed) and the row of ``step``."""
        row = {"step": str(step), **console_metrics}
        columns = self._fit_columns(row)
        header = [] if columns == self._last_columns else _format_header(columns)
        self._last_columns = columns
        return header, COLUMN_GAP.join(row[label].rjust(width) for label, width in columns)

    def _fit_columns(self, row: Mapping[str, str]) -> list[tuple[str, int]]:
        columns = []
        remaining_width = self.width + len(COLUMN_GAP)
        for label, value in row.items():
            needed_width = max(map(len, (value, *LABEL_BREAK.split(label))))
            width = max(needed_width, self._column_widths.get(label, 0))
            self._column_widths[label] = width
            remaining_width -= width + len(COLUMN_GAP)
            if remaining_width < 0:
                break
            columns.append((label, width))
        return columns


def _format_header(columns: Iterable[tuple[str, int]]) -> list[str]:
    """Format the labels of ``columns`` (label, width) as header lines, one word per line."""
    label_words = [reversed(LABEL_BREAK.split(label)) for label, _ in columns]
    widths = [width for _, width in columns]
    lines = [
        COLUMN_GAP.join(word.rjust(width) for word, width in zip(row, widths, strict=True))
        for row in zip_longest(*label_words, fillvalue="")
    ]
    return lines[::-1]


class TrainingConsole:
    """Progress of a run: a bar and a row per step on a terminal, otherwise a log line per step."""

    def __init__(
        self, total_steps: int | None = None, first_step: int = 0, console: Console | None = None
    ) -> None:
        self.console = console or get_console()
        self._step_table = StepTable(min(STEP_WIDTH, self.console.width))
        self._progress: Progress | None = None
        if self.console.is_terminal:
            self._progress = Progress(
                "training", total_steps, "steps", num_done_before=first_step, console=self.console
            )

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show the metrics of one step."""
        console_metrics = format_console_metrics(metrics)
        if self._progress is None:
            text = ", ".join(f"{label} {value}" for label, value in console_metrics.items())
            logger.info("step %d: %s", step, text)
            return
        self._progress.set_done(step)
        header, row = self._step_table.format_step(step, console_metrics)
        for line in header:
            self.console.print(Text(line, style="dim"))
        self.console.print(Text(row))

    def close(self) -> None:
        """Remove the progress bar. May be called twice."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
