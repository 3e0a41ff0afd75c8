"""Settings of the config section ``env.recall``."""

from typing import Annotated

from annotated_types import Ge, Le

from agent_system.environments.settings import PromptSettings
from verl.config.settings import PositiveInt


class RecallSettings(PromptSettings):
    """Length of an episode and number of tasks."""

    pages: Annotated[int, Ge(3), Le(100)] = 6
    """pages per episode; the arrow that the question asks for is never on the last two"""
    arrows: Annotated[int, Ge(1), Le(9)] = 2
    """arrows per page"""
    train_tasks: PositiveInt = 2000
    """number of training episodes; any number is possible"""
    val_tasks: PositiveInt = 256
    """number of validation episodes"""
    task_seed: int = 0
    """seed of the pages, independent of the seed of the run"""

    def count_configured_tasks(self, split: str) -> int | None:
        return self.val_tasks if split == "val" else self.train_tasks

    def count_needed_turns(self) -> int | None:
        return self.pages + 2
