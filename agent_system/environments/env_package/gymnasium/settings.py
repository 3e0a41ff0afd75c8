"""The ``env.gymnasium`` section."""

from typing import Any, ClassVar, Literal

from agent_system.environments.settings import EnvSettings, FunctionFromFile
from verl.config.settings import PositiveInt, Seed

Win = Literal["reward", "end", "survival"]


class GymnasiumSettings(EnvSettings):
    """Which environment is played, and how it is told."""

    variant_key: ClassVar[str] = "env_id"

    env_id: str = "Taxi-v4"
    """Gymnasium's name of the environment, as in env.env_name=gymnasium/Taxi-v4; MODULE:NAME
    imports the module that registers it first"""
    options: dict[str, Any] = {}
    """arguments of gymnasium.make"""
    describe: FunctionFromFile = FunctionFromFile()
    """function describe(observation, info, env) of the user's own that returns the text of an
    observation; null: words of the package where it knows the environment, else the numbers"""
    actions: list[str] = []
    """names of the actions, in the order of their numbers; none: those that the package knows, else
    the numbers"""
    rules: str | None = None
    """what the system message says of the environment; null: what the package knows"""
    won_by: Win | None = None
    """reward: the last step ended the episode and was paid for; end: it ended the episode;
    survival: the episode lasted for env.max_steps or was cut by Gymnasium; null: what the package
    knows, else reward"""
    reward: Literal["won", "gym"] = "won"
    """won: 1.0 for winning, else 0.0; gym: what Gymnasium pays, step by step"""
    list_actions: bool = False
    """end observations with the possible actions; the system message names them all"""
    train_tasks: PositiveInt = 1000
    """starts to train on"""
    val_tasks: PositiveInt = 128
    """starts held out: other seeds than those of training"""
    task_seed: Seed = 0
    """seed of the starts, of both splits"""

    def known_tasks(self, split: str) -> int | None:
        """How many starts ``split`` has."""
        return self.val_tasks if split == "val" else self.train_tasks
