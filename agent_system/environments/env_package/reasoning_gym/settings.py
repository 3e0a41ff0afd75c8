"""Settings of the config section ``env.reasoning_gym``."""

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from agent_system.environments.settings import GraderLimitSettings
from verl.config.settings import PositiveInt, Seed

# Generators that need 0.1 to 0.7 seconds per question. By default they have fewer tasks.
SLOW_GENERATORS = (
    "futoshiki",
    "intermediate_integration",
    "knight_swap",
    "polynomial_equations",
    "puzzle24",
    "quantum_lock",
    "rearc",
    "sokoban",
    "zebra_puzzles",
)
SLOW_TASK_COUNTS = {"train_tasks": 256, "val_tasks": 64}


class ReasoningGymSettings(GraderLimitSettings):
    """Choice of the generator and number of questions."""

    variant_key: ClassVar[str] = "task"
    is_single_turn: ClassVar[bool] = True

    task: str = "chain_sum"
    """reasoning-gym's name of the generator, as in env.env_name=reasoning_gym/countdown"""
    options: dict[str, dict[str, Any]] = {}
    """settings of generators by name, such as {chain_sum: {min_terms: 2, max_terms: 3}}"""
    train_tasks: PositiveInt = 2000
    """number of training questions; null: 2000, for slow generators 256"""
    val_tasks: PositiveInt = 512
    """number of validation questions; null: 512, for slow generators 64"""
    task_seed: Seed = 0
    """seed of the questions of both splits"""
    prompt: Literal["full", "compact"] = "full"
    """full: the question and the answer format, for chat models; compact: the question only, with
    a space between digits, for policies trained by imitation"""

    @model_validator(mode="before")
    @classmethod
    def _reduce_tasks_of_slow_generators(cls, values: object) -> Any:
        if not isinstance(values, dict) or values.get("task") not in SLOW_GENERATORS:
            return values
        return SLOW_TASK_COUNTS | {key: value for key, value in values.items() if value is not None}

    def count_configured_tasks(self, split: str) -> int | None:
        return self.val_tasks if split == "val" else self.train_tasks
