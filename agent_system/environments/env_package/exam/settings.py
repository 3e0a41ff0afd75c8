"""Settings of the config section ``env.exam``."""

from typing import Any

from pydantic import field_validator

from agent_system.environments.env_package.exam.solvers import SOLVERS
from agent_system.environments.settings import PromptSettings
from verl.config.settings import InvalidSettingError, PositiveInt, Seed

# Generator options that differ from reasoning-gym's defaults. Terms of sums have one digit, because
# small policies cannot add longer ones. By default sums have 2 to 6 terms, and texts 5 to 15 words.
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    "color_cube_rotation": {"min_rotations": 1, "max_rotations": 5},
    "chain_sum": {"max_digits": 1},
}


class ExamSettings(PromptSettings):
    """Settings of the exam: number and generators of the questions, and number of tasks."""

    questions: PositiveInt = 8
    """questions per episode; all must be answered right"""
    generators: tuple[str, ...] = tuple(SOLVERS)
    """generators of reasoning-gym, each with the same share of the questions"""
    options: dict[str, dict[str, Any]] = DEFAULT_OPTIONS
    """settings of generators by name, which set the range of difficulties"""
    train_tasks: PositiveInt = 2000
    """number of training episodes; any number is possible"""
    val_tasks: PositiveInt = 512
    """number of validation episodes; training and demonstrations contain none of their questions"""
    task_seed: Seed = 0
    """seed of the questions, independent of the seed of the run"""
    demonstrated_questions: PositiveInt = 1
    """questions per demonstrated episode; env.history=window with history_length=0 needs 1"""

    @field_validator("generators")
    @classmethod
    def _check_generators(cls, generators: tuple[str, ...]) -> tuple[str, ...]:
        generators_without_solver = [name for name in generators if name not in SOLVERS]
        if generators_without_solver or not generators or len(set(generators)) < len(generators):
            reason = "demonstrations need a solver of each generator, and no generator twice"
            allowed = f"one or more of {', '.join(SOLVERS)}"
            raise InvalidSettingError("generators", reason, allowed, "[color_cube_rotation]")
        return generators

    def count_configured_tasks(self, split: str) -> int:
        return self.val_tasks if split == "val" else self.train_tasks

    def count_needed_turns(self) -> int | None:
        return self.questions
