"""The ``env.dataset`` section."""

from typing import Any

from agent_system.environments.settings import GradedSettings
from verl.utils.settings import Section


class FunctionFromFile(Section):
    """A function or class of the user's own."""

    path: str | None = None
    """Python file that defines a function or class"""
    name: str | None = None
    """name of the function or class in its file"""


class RewardFromFile(FunctionFromFile):
    """A function ``compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)``,
    which returns a number or a dictionary with ``score``, or a coroutine of one.
    """

    reward_kwargs: dict[str, Any] = {}
    """further arguments of the function"""


class DatasetSettings(GradedSettings):
    """Which files, which columns, and who grades."""

    train_files: list[str] = []
    """Parquet or JSON-lines files to train on"""
    val_files: list[str] = []
    """Parquet or JSON-lines files to validate on"""
    prompt_key: str = "prompt"
    """column of the prompt: messages, or the text of one user message"""
    reward_fn_key: str = "data_source"
    """column that says where a row is from; results are reported by it"""
    custom_cls: FunctionFromFile = FunctionFromFile()
    """class of rows of the user's own: called with the files of a split, it has a length and rows
    by number, with the columns of a file"""
    reward: RewardFromFile = RewardFromFile()
    """function that grades; without a path the grader of the package does"""

    def file_key(self, split: str) -> str | None:
        """``train_files`` or ``val_files``."""
        return f"{split}_files"
