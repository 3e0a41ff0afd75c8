"""Settings of the config section ``env.gymnasium``."""

from typing import Any, ClassVar, Literal

from agent_system.environments.settings import EnvSettings, FunctionFromFile
from verl.config.settings import PositiveInt, Seed

SuccessCondition = Literal["reward", "end", "survival"]


class GymnasiumSettings(EnvSettings):
    """Id of the Gymnasium environment, and functions that describe its observations as text."""

    variant_key: ClassVar[str] = "env_id"

    env_id: str = "Taxi-v4"
    """Gymnasium's name of the environment, as in env.env_name=gymnasium/Taxi-v4; MODULE:NAME
    first imports the module that registers it"""
    options: dict[str, Any] = {}
    """arguments of gymnasium.make"""
    describe: FunctionFromFile = FunctionFromFile()
    """user-provided function describe(observation, info, env) that returns the text of an
    observation; null: the description of this package if it has one, else the numbers"""
    actions: list[str] = []
    """names of the actions, in the order of their numbers; empty: the names of this package if it
    has any, else the numbers"""
    rules: str | None = None
    """rules in the system message; null: the rules of this package"""
    won_by: SuccessCondition | None = None
    """condition of success. reward: the last step ended the episode with a reward above 0; end:
    it ended the episode; survival: the episode lasted for env.max_steps or Gymnasium truncated it;
    null: the condition of this package, else reward"""
    reward: Literal["won", "gym"] = "won"
    """won: 1.0 for success, else 0.0; gym: Gymnasium's reward of each step"""
    list_actions: bool = False
    """list the possible actions at the end of observations; the system message lists all actions"""
    train_tasks: PositiveInt = 1000
    """number of start states for training"""
    val_tasks: PositiveInt = 128
    """number of start states for validation, with other seeds than those of training"""
    task_seed: Seed = 0
    """seed of the start states of both splits"""

    def count_configured_tasks(self, split: str) -> int | None:
        return self.val_tasks if split == "val" else self.train_tasks
