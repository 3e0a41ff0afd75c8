"""The ``env.textworld`` section."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic import model_validator

from agent_system.environments.settings import EnvSettings
from verl.config.settings import PositiveInt, Refusal, Seed


class TextWorldSettings(EnvSettings):
    """Which games TextWorld makes; a key that shapes another game changes nothing."""

    variant_key: ClassVar[str] = "game"

    game: Literal["coin_collector", "treasure_hunter", "simple", "cooking"] = "treasure_hunter"
    """kind of game"""
    level: Annotated[int, Ge(1), Le(300)] = 5
    """difficulty of coin_collector (at most 300) and treasure_hunter (at most 30)"""
    rewards: Literal["dense", "balanced", "sparse"] = "dense"
    """how often simple pays"""
    goal: Literal["detailed", "brief", "none"] = "detailed"
    """how much of the way simple tells"""
    recipe: Annotated[int, Ge(1), Le(5)] = 1
    """ingredients of cooking"""
    take: Annotated[int, Ge(0), Le(5)] = 1
    """ingredients of cooking that must be fetched"""
    go: Literal[1, 6, 9, 12] = 1
    """places of cooking"""
    open: bool = True
    """doors and containers of cooking are closed"""
    cook: bool = False
    """ingredients of cooking must be cooked"""
    cut: bool = False
    """ingredients of cooking must be cut"""
    drop: bool = False
    """what can be carried in cooking is limited"""
    train_games: PositiveInt = 100
    """games to train on"""
    val_games: PositiveInt = 24
    """games held out"""
    game_seed: Seed = 0
    """seed of the games: the same ones in every run"""
    data_dir: str = "data/textworld"
    """where games are stored by content hash"""
    list_actions: bool = True
    """end observations with the possible commands"""

    @model_validator(mode="after")
    def _can_be_made(self) -> "TextWorldSettings":
        if self.game == "treasure_hunter" and self.level > 30:
            why = "treasure_hunter has the levels 1 to 30"
            raise Refusal(
                "level", why, "1 to 30", "a lower level, or env.textworld.game=coin_collector"
            )
        if self.game == "cooking" and self.take > self.recipe:
            why = "more than the recipe has"
            raise Refusal(
                "take", why, f"at most env.textworld.recipe={self.recipe} ingredients", "lower it"
            )
        return self
