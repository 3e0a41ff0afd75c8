"""Tracking services through accelerate: a failing one is reported once and never stops training."""

import dataclasses
import difflib
import logging
from pathlib import Path
from typing import Any

from verl.utils.settings import Section

logger = logging.getLogger(__name__)

FILE = ("console", "file")  # what the run directory and the terminal do without a service
NAMES = (
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
_CONFIG_KEYS = {"tensorboard": 100}  # hparams beyond that make the page useless


def check_backends(backends: list[str]) -> None:
    """Raise ``ValueError`` for a backend that does not exist, with the nearest name."""
    for name in backends:
        if name not in (*FILE, *NAMES):
            near = difflib.get_close_matches(name, (*FILE, *NAMES), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"trainer.logger has {name!r}{hint} There are: {', '.join((*FILE, *NAMES))}"
            )


class Service:
    """One service behind the tracker boundary: after its first failure it is silent."""

    def __init__(
        self, name: str, project: str, experiment: str, directory: Path, config: dict[str, Any]
    ) -> None:
        self.name = name
        self._tracker: Any = None
        self._guard(self._start, project, experiment, directory, config)

    def log(self, values: dict[str, float], step: int) -> None:
        """Send the metrics of one step."""
        if self._tracker is not None:
            self._guard(self._tracker.log, values, step=step)

    def log_texts(self, name: str, columns: list[str], rows: list[list[str]], step: int) -> None:
        """Send rows of text, where the service can show a table or text."""
        if hasattr(self._tracker, "log_table"):
            self._guard(self._tracker.log_table, name, columns=columns, data=rows, step=step)
        elif self._tracker is not None and self.name == "tensorboard":
            texts = {f"{name}/{number}": "\n\n".join(row) for number, row in enumerate(rows)}
            self._guard(self._tracker.log, texts, step=step)

    def finish(self) -> None:
        """Close the service."""
        if self._tracker is not None:
            self._guard(self._tracker.finish)
            self._tracker = None

    def _guard(self, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # the tracker boundary
            self._tracker = None
            logger.warning(
                "tracker %s is off for the rest of the run: %r; metrics.jsonl goes on",
                self.name,
                error,
            )

    def _start(
        self, project: str, experiment: str, directory: Path, config: dict[str, Any]
    ) -> None:
        from accelerate import PartialState  # imported where it is used: it loads torch
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState(cpu=True)  # accelerate's trackers ask it whether this is the main process
        tracker = LOGGER_TYPE_TO_CLASS[self.name](**self._arguments(project, experiment, directory))
        tracker.start()
        self._tracker = tracker
        values = flatten(config)
        limit = _CONFIG_KEYS.get(self.name)
        tracker.store_init_configuration(dict(list(values.items())[:limit]))

    def _arguments(self, project: str, experiment: str, directory: Path) -> dict[str, Any]:
        if self.name in ("tensorboard", "aim"):
            return {"run_name": experiment, "logging_dir": str(directory)}
        if self.name == "wandb":
            return {
                "run_name": project,
                "name": experiment,
                "dir": str(directory),
                "resume": "allow",
            }
        if self.name == "mlflow":
            return {
                "experiment_name": project,
                "run_name": experiment,
                "logging_dir": str(directory),
            }
        if self.name == "swanlab":
            return {"run_name": project, "experiment_name": experiment, "logdir": str(directory)}
        return {"run_name": f"{project}-{experiment}"}


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts, sections and dataclasses as ``{"a.b": value}`` with plain values; lists become text."""
    if isinstance(config, Section):
        config = config.model_dump(mode="json")
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    flat: dict[str, Any] = {}
    for key, value in dict(config).items():
        name = f"{prefix}{key}"
        if hasattr(value, "keys") or dataclasses.is_dataclass(value):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat
