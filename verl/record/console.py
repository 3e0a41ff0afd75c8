"""What a person watching the training sees: a progress bar and a short table per step, plain lines
elsewhere.
"""

import logging
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from verl.sections import ConsoleFigure, MetricTable, arrange, contributions

logger = logging.getLogger(__name__)

MIN_WIDTH = 110  # columns of a table that is written to a file
FIGURES = (
    ConsoleFigure("held-out success", ("val/success_rate",), "{:.1%}"),
    ConsoleFigure("train success", ("episode/success_rate",), "{:.1%}"),
    ConsoleFigure("return", ("episode/reward",)),
    ConsoleFigure("score", ("critic/score/mean",)),
    ConsoleFigure("tokens/episode", ("rollout/tokens_per_episode",), "{:.0f}"),
    ConsoleFigure("entropy", ("actor/entropy",), "{:.3f}"),
    ConsoleFigure("loss", ("actor/pg_loss",), "{:+.4f}"),
    ConsoleFigure("grad norm", ("actor/grad_norm",)),
    ConsoleFigure("engine vs trainer", ("training/rollout_probs_diff_mean",), "{:.1e}"),
    ConsoleFigure("s/step", ("timing_s/step",), "{:.1f}"),
)


def summary(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """The few figures worth a glance, formatted; those that ``metrics`` lacks are left out."""
    added = [figure for contribution in contributions() for figure in contribution.console]
    shown = {}
    for figure in arrange(FIGURES, added):
        values = [metrics.get(name) for name in figure.metrics]
        numbers = [float(value) for value in values if value is not None]
        # All numbers of a figure or none: beside a gap nobody could tell which is missing.
        if len(numbers) == len(figure.metrics):
            shown[figure.label] = " ".join(figure.form.format(number) for number in numbers)
    return shown


def metric_table(declared: MetricTable, metrics: Mapping[str, float]) -> Table:
    """The lines of ``declared`` that ``metrics`` hold, as a table for a terminal."""
    table = Table(box=None, pad_edge=False, title=declared.title, title_justify="left")
    table.add_column(declared.head)
    for column in declared.columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for name in declared.lines(metrics):
        table.add_row(*declared.cells(metrics, name))
    return table


def show_tables(declared: Iterable[MetricTable], metrics: Mapping[str, float]) -> None:
    """Write those of the ``declared`` tables that have lines in ``metrics`` to standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=MIN_WIDTH)
    for table in declared:
        if table.lines(metrics):
            console.print(metric_table(table, metrics))


class TrainingConsole:
    """Progress of a run.

    On a terminal a bar and a row of figures per step; otherwise one log line per step.
    """

    def __init__(
        self, total_steps: int | None = None, first_step: int = 0, console: Console | None = None
    ) -> None:
        # stdout is left to what a command has to say, so that it can be piped.
        self.console = console or Console(stderr=True)
        self._header: list[str] = []
        self._progress: Progress | None = None
        if not self.console.is_terminal:
            return
        columns = [TextColumn("[bold]training"), BarColumn(), MofNCompleteColumn()]
        times = [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
        self._progress = Progress(*columns, *times, console=self.console, transient=True)
        self._task = self._progress.add_task("steps", total=total_steps, completed=first_step)
        self._progress.start()

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show the metrics of one step."""
        figures = summary(metrics)
        if self._progress is None:
            logger.info(
                "step %d: %s",
                step,
                ", ".join(f"{label} {value}" for label, value in figures.items()),
            )
            return
        self._progress.update(self._task, completed=step)
        self.console.print(self._table(step, figures))

    def _table(self, step: int, figures: dict[str, str]) -> Table:
        # A header again only where columns change, as they do at a validation.
        table = Table(
            box=None, show_header=list(figures) != self._header, pad_edge=False, header_style="dim"
        )
        self._header = list(figures)
        for label in ["step", *figures]:
            table.add_column(label, justify="right", min_width=max(6, len(label)), no_wrap=True)
        table.add_row(f"[bold]{step}", *figures.values())
        return table

    def close(self) -> None:
        """Remove the bar; may be called twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
