"""Metrics of the trainer: written to ``metrics.jsonl``, the terminal and the configured trackers.

Tracking.log ──┬──▶ metrics.jsonl     one line per step, on disk when ``log`` returns
               ├──▶ TrainingConsole   the most important metrics
               └──▶ TrackingService ...  through accelerate; off after its first failure
"""

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, SupportsFloat

from verl.record.console import TrainingConsole
from verl.record.run_dir import flatten_config
from verl.utils import jsonl
from verl.utils.files import rename_with_number

logger = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
BUILT_IN_TRACKERS = ("console", "file")  # loggers that need no service
MAX_TENSORBOARD_KEYS = 100  # config keys sent to TensorBoard, which cannot show more legibly
_LAUNCHER_VARIABLE = re.compile(
    r"(LOCAL_)?(RANK|WORLD_SIZE)|(PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD|MPI)(_\w+)?"
)

Arguments = ParamSpec("Arguments")


class Tracking:
    """Context manager that writes the metrics of a run. A failing tracker never stops training.

    ``resume_step`` is the step of the checkpoint from which training continues. Lines of later
    steps and an incomplete last line are removed from ``metrics.jsonl``. With None an existing file
    is renamed. With ``keeps_later_steps`` the lines of later steps stay: the run only measures the
    checkpoint. ``total_steps`` is the length of the progress bar.
    """

    def __init__(
        self,
        project: str,
        experiment: str,
        backends: Sequence[str],
        config: object,
        run_dir: str | Path,
        *,
        resume_step: int | None = None,
        keeps_later_steps: bool = False,
        total_steps: int | None = None,
        console: TrainingConsole | None = None,
    ) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        first_repeated_step: int | None = None
        if resume_step is None or not keeps_later_steps:
            prepare_metrics_file(self.path, resume_step)
            first_repeated_step = 0 if resume_step is None else resume_step + 1
        self.console = console
        if self.console is None and "console" in backends:
            self.console = TrainingConsole(total_steps=total_steps, first_step=resume_step or 0)
        directory = Path(run_dir) / "logs"
        self.services = [
            TrackingService(name, project, experiment, directory, config, first_repeated_step)
            for name in backends
            if name not in BUILT_IN_TRACKERS
        ]

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Write, print and send ``data`` (metric name -> number) as the metrics of ``step``."""
        # Write the file first, so that the metrics are stored even if a service fails.
        jsonl.append(self.path, {"step": step, "time": time.time(), **data})
        if self.console is not None:
            self.console.step(step, data)
        numeric_metrics = {key: float(value) for key, value in data.items() if _is_number(value)}
        for service in self.services:
            service.log(numeric_metrics, step)

    def log_texts(self, name: str, columns: list[str], rows: list[list[str]], step: int) -> None:
        """Send the table ``name`` of texts to the services that can show texts."""
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


def _is_number(value: object) -> bool:
    """Return True for a number and for an array or tensor of shape ``()``."""
    # SupportsFloat excludes strings but includes arrays of any shape, so check ndim too.
    return isinstance(value, SupportsFloat) and getattr(value, "ndim", 0) == 0


# ---- metrics.jsonl -----------------------------------------------------------------------------


def prepare_metrics_file(path: Path, resume_step: int | None) -> None:
    """Remove the lines of steps after ``resume_step`` from the metrics file ``path``.

    If ``resume_step`` is None, a new run starts. An existing file is then renamed.
    """
    if not path.exists():
        return
    if resume_step is None:
        new_name = rename_with_number(path).name
        logger.info("the metrics of an earlier run in this directory are now in %s", new_name)
        return
    kept_records = [record for record in jsonl.read(path) if record.get("step", 0) <= resume_step]
    jsonl.write(path, kept_records)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return one dict of metrics per step of a run, ordered by step.

    Lines of the same step are merged. The last line that has a metric determines its value. Values
    that are neither null nor finite numbers are omitted: readers compute with them.
    """
    metrics_by_step: dict[int, dict[str, Any]] = {}
    for record in jsonl.read(Path(run_dir) / METRICS_FILE):
        if isinstance(record.get("step"), int):
            # Intern the names: a copy of every name per step would take most of the memory.
            metrics = {
                sys.intern(name): value
                for name, value in record.items()
                if value is None or _is_finite(value)
            }
            metrics_by_step.setdefault(record["step"], {}).update(metrics)
    return [metrics_by_step[step] for step in sorted(metrics_by_step)]


def _is_finite(value: object) -> bool:
    # Integers can be too large for a float.
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


# ---- services ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _hidden_launcher_variables() -> Iterator[None]:
    """Hide the variables with which torchrun and MPI number processes.

    Otherwise accelerate would wait for the other processes, or log nothing outside of rank 0.
    """
    hidden_variables = {
        name: value for name, value in os.environ.items() if _LAUNCHER_VARIABLE.fullmatch(name)
    }
    try:
        for name in hidden_variables:
            del os.environ[name]
        yield
    finally:
        os.environ.update(hidden_variables)


class TrackingService:
    """Connection to a tracking service, such as wandb. After its first failure it sends nothing.

    TensorBoard hides the values that an earlier start of the run sent for ``first_step`` and later
    steps, because training repeats these steps. With None it hides nothing.
    """

    def __init__(
        self,
        name: str,
        project: str,
        experiment: str,
        directory: Path,
        config: object,
        first_step: int | None = None,
    ) -> None:
        self.name = name
        self.first_step = first_step
        self._tracker: Any = None
        self._call_guarded(self._start, project, experiment, directory, config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step."""
        if self._tracker is not None:
            self._call_guarded(self._tracker.log, values, step=step)

    def log_texts(self, name: str, columns: list[str], rows: list[list[str]], step: int) -> None:
        """Send the table ``name`` of texts if the service can show tables or texts."""
        if hasattr(self._tracker, "log_table"):
            self._call_guarded(self._tracker.log_table, name, columns=columns, data=rows, step=step)
        elif self._tracker is not None and self.name == "tensorboard":
            texts = {f"{name}/{row_index}": "\n\n".join(row) for row_index, row in enumerate(rows)}
            self._call_guarded(self._tracker.log, texts, step=step)

    def finish(self) -> None:
        """Close the tracker of the service, unless it was switched off."""
        if self._tracker is not None:
            self._call_guarded(self._tracker.finish)
            self._tracker = None

    def _call_guarded(
        self,
        function: Callable[Arguments, object],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # catch every error: a failed tracker must not end training
            self._tracker = None
            text = "tracker %s is off for the rest of the run: %r; metrics.jsonl is still written"
            logger.warning(text, self.name, error)

    def _start(self, project: str, experiment: str, directory: Path, config: object) -> None:
        from accelerate import PartialState  # lazy import: it loads torch
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        with _hidden_launcher_variables():
            PartialState(cpu=True)  # accelerate's trackers need it to identify the main process
        tracker_arguments = self._make_tracker_arguments(project, experiment, str(directory))
        tracker = LOGGER_TYPE_TO_CLASS[self.name](**tracker_arguments)
        tracker.start()
        self._tracker = tracker
        config_items = list(flatten_config(config).items())
        max_keys = MAX_TENSORBOARD_KEYS if self.name == "tensorboard" else None
        tracker.store_init_configuration(dict(config_items[:max_keys]))

    def _make_tracker_arguments(self, project: str, experiment: str, path: str) -> dict[str, Any]:
        """Return the keyword arguments of this service's tracker class in accelerate."""
        arguments = {
            "clearml": {
                "project_name": os.environ.get("CLEARML_PROJECT", project),
                "task_name": os.environ.get("CLEARML_TASK", experiment),
            },
            "dvclive": {"dir": path},
            "trackio": {"run_name": project, "name": experiment},
            "aim": {"run_name": experiment, "logging_dir": path},
            "mlflow": {"experiment_name": project, "run_name": experiment, "logging_dir": path},
            "swanlab": {"run_name": project, "experiment_name": experiment, "logdir": path},
            "tensorboard": {
                "run_name": experiment,
                "logging_dir": path,
                "purge_step": self.first_step,
            },
            "wandb": {"run_name": project, "name": experiment, "dir": path, "resume": "allow"},
        }
        return arguments.get(self.name, {"run_name": f"{project}-{experiment}"})
