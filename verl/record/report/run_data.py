"""Data of a report, read from a run directory. A missing file counts as empty."""

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.config.yaml_files import parse_yaml
from verl.record.run_dir import RunDirectory
from verl.record.tracking import read_metrics

logger = logging.getLogger(__name__)
Points = tuple[list[int], list[float]]  # training steps, and the values of a metric at these steps


@dataclass
class RunData:
    """Content of a run directory: configuration, ``env.json`` as ``facts``, and metrics by step."""

    directory: RunDirectory
    config: dict[str, Any]
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def metric_names(self) -> list[str]:
        """Return the sorted names of all logged metrics."""
        return sorted({key for line in self.metrics for key in line} - {"step", "time"})

    def metric_points(self, name: str) -> Points:
        """Return the steps at which a metric was logged as a number, and its value at each step."""
        return self._points_by_metric.get(name, ([], []))

    @functools.cached_property
    def _points_by_metric(self) -> dict[str, Points]:
        points_by_metric: dict[str, Points] = {}
        for line in self.metrics:
            for name, value in line.items():
                if _is_number(value):
                    steps, values = points_by_metric.setdefault(name, ([], []))
                    steps.append(line["step"])
                    values.append(float(value))
        return points_by_metric

    @functools.cached_property
    def _validation_lines(self) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in self.metrics if "val/success_rate" in line}

    def last_mean(self, name: str, window: int = 1) -> float | None:
        """Return the mean of the last ``window`` values of a metric, or None without values."""
        values = self.metric_points(name)[1][-window:]
        return sum(values) / len(values) if values else None

    def first_value(self, name: str) -> float | None:
        """Return the first value of a metric, or None without values."""
        values = self.metric_points(name)[1]
        return values[0] if values else None

    def get_last_metrics(self, prefix: str) -> dict[str, float]:
        """Return the metrics that begin with ``prefix``, at the last step that has any."""
        for line in reversed(self.metrics):
            numbers = {
                name: float(value)
                for name, value in line.items()
                if name.startswith(prefix) and _is_number(value)
            }
            if numbers:
                return numbers
        return {}

    def config_value(self, path: str, default: object = None) -> Any:
        """Return the configuration value at the dotted ``path``, or ``default`` if it is absent."""
        value = self.config
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    def success_interval(self, step: int) -> tuple[float, float]:
        """Return the 95% interval (low, high) of the success rate of the validation at ``step``."""
        line = self._validation_lines[step]
        rate = line["val/success_rate"]  # both bounds of a run without a logged interval
        return line.get("val/success_rate_low", rate), line.get("val/success_rate_high", rate)


def _is_number(value: object) -> bool:
    # Booleans are integers in Python, and a chart cannot show NaN.
    return type(value) in (int, float) and value == value


def load_run(run_dir: str | Path) -> RunData:
    """Read a run directory.

    Raises ``FileNotFoundError`` if it has neither ``metrics.jsonl`` nor ``config.yaml``.
    """
    directory = RunDirectory(run_dir)
    metrics = read_metrics(run_dir)
    if not metrics and not directory.config_path.exists():
        raise FileNotFoundError(
            f"{run_dir} holds neither metrics.jsonl nor config.yaml: it is not a run directory"
        )
    config = _read_mapping(directory.config_path, parse_yaml)
    facts = _read_mapping(directory.env_path, json.loads)
    return RunData(directory, config, facts, metrics)


def _read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Return the mapping in ``path``, or an empty one if the file is missing or unreadable."""
    if not path.is_file():  # a pipe or a device may never end
        return {}
    try:
        mapping = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        logger.warning("%s cannot be read and is ignored: %s", path, error)
        return {}
    return mapping if isinstance(mapping, dict) else {}
