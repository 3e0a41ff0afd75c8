"""Metrics out of the trainer: always to ``metrics.jsonl``, to the terminal, and to services where
asked for.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.record.console import TrainingConsole
from verl.record.tracker_services import FILE, Service, check_backends
from verl.utils import jsonl

logger = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"


class Tracking:
    """``log(metrics, step)`` writes one line per step and shows it; nothing a service does can stop
    training.

    ``resume_step`` is the step whose checkpoint training continues from: lines of later steps,
    which will be played again, are removed, and so is a torn last line. ``None`` starts afresh; an
    older file is kept under another name. ``total_steps`` is the length of the progress bar. Use as
    a context manager or call ``finish``.
    """

    def __init__(
        self,
        project: str,
        experiment: str,
        backends: Sequence[str],
        config: Any,
        run_dir: str | Path,
        *,
        resume_step: int | None = None,
        total_steps: int | None = None,
        console: TrainingConsole | None = None,
    ) -> None:
        check_backends(list(backends))
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        prepare_metrics(self.path, resume_step)
        self.console = console
        if self.console is None and "console" in backends:
            self.console = TrainingConsole(total_steps=total_steps, first_step=resume_step or 0)
        names = [name for name in backends if name not in FILE]
        directory = Path(run_dir) / "logs"
        self.services = [Service(name, project, experiment, directory, config) for name in names]

    def log(self, data: dict[str, Any], step: int) -> None:
        """Write, show and send ``data`` (metric name -> number) as the metrics of ``step``."""
        jsonl.append(self.path, {"step": step, "time": time.time(), **data})
        if self.console is not None:
            self.console.step(step, data)
        numbers = {key: float(value) for key, value in data.items() if _is_number(value)}
        for service in self.services:
            service.log(numbers, step)

    def log_texts(self, name: str, columns: list[str], rows: list[list[str]], step: int) -> None:
        """Send rows of text to the services that can show them."""
        for service in self.services:
            service.log_texts(name, columns, rows, step)

    def finish(self) -> None:
        """Close the terminal's progress bar and the services."""
        if self.console is not None:
            self.console.close()
        for service in self.services:
            service.finish()

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()


def _is_number(value: Any) -> bool:
    return (
        not isinstance(value, str)
        and getattr(value, "ndim", 0) == 0
        and hasattr(value, "__float__")
    )


def prepare_metrics(path: Path, resume_step: int | None) -> None:
    """Keep the lines up to ``resume_step``, or set the whole file aside when ``None``."""
    if not path.exists():
        return
    if resume_step is None:
        number = 1
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)
        logger.info("the metrics of an earlier run in this directory are now in %s", aside.name)
        return
    kept = [record for record in jsonl.read(path) if record.get("step", 0) <= resume_step]
    jsonl.write(path, kept)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The metrics of a run in order of steps; what was logged for the same step is merged, the
    later value wins.
    """
    steps: dict[int, dict[str, Any]] = {}
    for record in jsonl.read(Path(run_dir) / METRICS_FILE):
        if isinstance(record.get("step"), int):
            steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]
