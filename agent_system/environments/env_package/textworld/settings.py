"""Settings of the config section ``env.textworld``."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic import model_validator

from agent_system.environments.settings import EnvSettings
from verl.config.settings import InvalidSettingError, PositiveInt, Seed


class TextWorldSettings(EnvSettings):
    """Kind and parameters of the games. Parameters of other kinds have no effect."""

    variant_key: ClassVar[str] = "game"

    game: Literal["coin_collector", "treasure_hunter", "simple", "cooking"] = "treasure_hunter"
    """kind of game"""
    level: Annotated[int, Ge(1), Le(300)] = 5
    """difficulty of coin_collector (at most 300) and treasure_hunter (at most 30)"""
    rewards: Literal["dense", "balanced", "sparse"] = "dense"
    """frequency of rewards in games of kind simple"""
    goal: Literal["detailed", "brief", "none"] = "detailed"
    """detail of the instructions in games of kind simple"""
    recipe: Annotated[int, Ge(1), Le(5)] = 1
    """number of ingredients in games of kind cooking"""
    take: Annotated[int, Ge(0), Le(5)] = 1
    """number of ingredients that must be fetched in games of kind cooking"""
    go: Literal[1, 6, 9, 12] = 1
    """number of locations in games of kind cooking"""
    open: bool = True
    """doors and containers are closed in games of kind cooking"""
    cook: bool = False
    """ingredients must be cooked in games of kind cooking"""
    cut: bool = False
    """ingredients must be cut in games of kind cooking"""
    drop: bool = False
    """the inventory is limited in games of kind cooking"""
    train_games: PositiveInt = 100
    """number of training games"""
    val_games: PositiveInt = 24
    """number of validation games"""
    game_seed: Seed = 0
    """seed of the games, independent of the seed of the run"""
    data_dir: str = "data/textworld"
    """folder in which games are stored by content hash"""
    list_actions: bool = True
    """list the possible commands at the end of observations"""

    @model_validator(mode="after")
    def _check_game_parameters(self) -> "TextWorldSettings":
        if self.game == "treasure_hunter" and self.level > 30:
            reason = "treasure_hunter has the levels 1 to 30"
            raise InvalidSettingError(
                "level", reason, "1 to 30", "a lower level, or env.textworld.game=coin_collector"
            )
        if self.game == "cooking" and self.take > self.recipe:
            reason = "the recipe has fewer ingredients"
            raise InvalidSettingError(
                "take",
                reason,
                f"at most env.textworld.recipe={self.recipe} ingredients",
                "lower it",
            )
        return self

    def count_needed_turns(self) -> int | None:
        """Return the number of moves to the coin of coin_collector, or None for other games.

        The coin is rewarded only when it is taken.
        """
        # Level 101 is level 1 with more rooms, and so is level 201.
        return (self.level - 1) % 100 + 1 if self.game == "coin_collector" else None
