"""What a report is made of, read from a run directory; files that are missing are simply empty."""

import functools
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.record.run_dir import RunDirectory
from verl.record.tracking import read_metrics

logger = logging.getLogger(__name__)
Points = tuple[list[int], list[float]]  # steps and values


@dataclass
class RunData:
    """Configuration, facts, metrics by step, and where the rollouts are."""

    directory: RunDirectory
    config: dict[str, Any]
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        """Every metric that was logged, sorted."""
        return sorted({key for line in self.metrics for key in line} - {"step", "time"})

    def points(self, name: str) -> Points:
        """Steps and values of a metric, where it was logged and finite."""
        return self._columns.get(name, ([], []))

    @functools.cached_property
    def _columns(self) -> dict[str, Points]:
        # One pass for all names: the page asks for each of some hundred.
        columns: dict[str, Points] = {}
        for line in self.metrics:
            for name, value in line.items():
                if _is_number(value):
                    steps, values = columns.setdefault(name, ([], []))
                    steps.append(line["step"])
                    values.append(float(value))
        return columns

    @functools.cached_property
    def _validations(self) -> dict[int, dict[str, Any]]:
        # Reversed: of two lines of a step the first one counts.
        lines = reversed(self.metrics)
        return {line["step"]: line for line in lines if "val/success_rate" in line}

    def last(self, name: str, window: int = 1) -> float | None:
        """Mean of the last ``window`` values of a metric."""
        values = self.points(name)[1][-window:]
        return sum(values) / len(values) if values else None

    def first(self, name: str) -> float | None:
        """First value of a metric."""
        values = self.points(name)[1]
        return values[0] if values else None

    def last_values(self, prefix: str) -> dict[str, float]:
        """The numbers of the last step that has some whose names begin with ``prefix``: those."""
        for line in reversed(self.metrics):
            found = {
                name: float(value)
                for name, value in line.items()
                if name.startswith(prefix) and _is_number(value)
            }
            if found:
                return found
        return {}

    def setting(self, path: str, default: Any = None) -> Any:
        """A configuration value by its dotted path."""
        value = self.config
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    def interval(self, step: int) -> tuple[float, float]:
        """95% bootstrap interval of the success rate of the validation of ``step``; the rate itself
        without one.
        """
        line = self._validations[step]
        rate = line["val/success_rate"]
        low = line.get("val/success_rate_low", rate)
        high = line.get("val/success_rate_high", rate)
        return low, high


def _is_number(value: object) -> bool:
    # To Python a bool is an int; as a point of a curve it would be 0 or 1.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not math.isnan(value)


def load_run(run_dir: str | Path) -> RunData:
    """Read a run directory. Raises ``FileNotFoundError`` when there is nothing of a run in it."""
    directory = RunDirectory(run_dir)
    metrics = read_metrics(run_dir)
    if not metrics and not directory.config_path.exists():
        raise FileNotFoundError(
            f"{run_dir} holds neither metrics.jsonl nor config.yaml: it is not a run directory"
        )
    config = _read_mapping(directory.config_path, yaml.safe_load)
    facts = _read_mapping(directory.env_path, json.loads)
    return RunData(directory, config, facts, metrics)


def _read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Return what ``path`` holds; nothing where there is no such file or it cannot be read."""
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        logger.warning("%s is left out: %s", path, error)
        return {}
    return values if isinstance(values, dict) else {}
