"""The ``env.dataset`` section."""

from collections.abc import Mapping
from typing import Any, ClassVar

from agent_system.environments.settings import FunctionFromFile, GradedSettings


class RewardFromFile(FunctionFromFile):
    """A function ``compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)``,
    which returns a number or a dictionary with ``score``, or a coroutine of one.
    """

    name: str | None = "compute_score"
    """name of the function in its file"""
    reward_kwargs: dict[str, Any] = {}
    """further arguments of the function"""
    weights: dict[str, float] = {}
    """weights of the rewards that the function returns by name, which sum to the score; {}: it is
    the one called score"""


class DatasetSettings(GradedSettings):
    """Which files, which columns, and who grades. A job says it with the keys of ``data_keys``."""

    one_step: ClassVar[bool] = True
    fits_prompts: ClassVar[bool] = True
    data_keys: ClassVar[Mapping[str, str]] = {
        "data.train_files": "train_files",
        "data.val_files": "val_files",
        "data.prompt_key": "prompt_key",
        "data.reward_fn_key": "reward_fn_key",
        "data.custom_cls.path": "custom_cls.path",
        "data.custom_cls.name": "custom_cls.name",
        "custom_reward_function.path": "reward.path",
        "custom_reward_function.name": "reward.name",
        "custom_reward_function.reward_kwargs": "reward.reward_kwargs",
        "custom_reward_function.timeout_s": "grade_s",
        "reward_model.weights": "reward.weights",
    }

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
