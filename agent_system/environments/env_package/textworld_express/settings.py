"""The ``env.textworld_express`` section."""

import re
from typing import Annotated, ClassVar, Literal, get_args

from annotated_types import Ge
from pydantic import field_validator

from agent_system.environments.settings import EnvSettings

Game = Literal[
    "cookingworld",
    "coin",
    "twc",
    "mapreader",
    "arithmetic",
    "sorting",
    "simonsays",
    "peckingorder",
]
GAMES: tuple[Game, ...] = get_args(Game)
PARAM = re.compile(r"\s*(\w+\s*=\s*\d+\s*)?")


class TextWorldExpressSettings(EnvSettings):
    """Which game is played, and the JVM that plays it."""

    variant_key: ClassVar[str] = "game"

    game: Game = "coin"
    """kind of game"""
    params: str = ""
    """parameters of the game, such as numLocations=4,includeDoors=0; others keep their defaults"""
    val_split: Literal["dev", "test"] = "dev"
    """the package's fold to validate on"""
    list_actions: bool = True
    """end observations with the possible actions"""
    heap_mb: Annotated[int, Ge(64)] = 256
    """largest heap of the JVM, in megabytes"""
    java_options: str = ""
    """more flags for the JVM"""

    @field_validator("params")
    @classmethod
    def _are_numbers(cls, params: str) -> str:
        for pair in params.split(","):  # the library leaves out what it cannot read
            if not PARAM.fullmatch(pair):
                raise ValueError(f"{pair!r} is not name=integer; allowed: name=integer,...")
        return params
