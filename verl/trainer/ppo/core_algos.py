"""Alias of ``verl.algos`` under verl's import path, for job code written for verl."""

from verl import algos
from verl.algos import *  # noqa: F403

__all__: list[str] = []
__all__ += algos.__all__
