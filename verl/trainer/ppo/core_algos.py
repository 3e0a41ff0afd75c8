"""``verl.algos`` under the path from which job code of this family of frameworks imports it."""

from verl import algos
from verl.algos import *  # noqa: F403

__all__: list[str] = []
__all__ += algos.__all__
