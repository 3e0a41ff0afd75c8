"""Settings of ``env.dataset``: files, columns and grader of single-turn data."""

from collections.abc import Mapping
from typing import Any, ClassVar

from agent_system.environments.settings import FunctionFromFile, GraderLimitSettings


class RewardFromFile(FunctionFromFile):
    """Python file and name of a user-provided grading function, and its arguments.

    ``compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)`` is a function
    or a coroutine function. It returns a number or a dictionary with ``score``.
    """

    name: str | None = "compute_score"
    """name of the function in its file"""
    reward_kwargs: dict[str, Any] = {}
    """additional keyword arguments of the function"""
    weights: dict[str, float] = {}
    """weights by name of the returned rewards; their weighted sum is the score; {}: the returned
    score"""


class DatasetSettings(GraderLimitSettings):
    """Settings of ``env.dataset``: files, columns and grader.

    The values of some keys outside ``env``, such as ``data.train_files``, are copied to this
    section. ``data_keys`` maps these keys to settings.
    """

    is_single_turn: ClassVar[bool] = True
    can_drop_or_truncate_prompts: ClassVar[bool] = True
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
    """column with the data source of a row; results are reported by data source"""
    custom_cls: FunctionFromFile = FunctionFromFile()
    """user-provided class of rows: called with the files of a split, it has a length and rows by
    number, with the columns of a file"""
    reward: RewardFromFile = RewardFromFile()
    """function that grades; without a path, the grader of the package"""

    def get_files_key(self, split: str) -> str | None:
        return f"{split}_files"
