"""Settings of the config section ``env.textworld_express``."""

import re
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge
from pydantic import field_validator

from agent_system.environments.settings import EnvSettings
from verl.config.settings.errors import UserError

GameName = Literal[
    "cookingworld",
    "coin",
    "twc",
    "mapreader",
    "arithmetic",
    "sorting",
    "simonsays",
    "peckingorder",
]
PARAMETER_PATTERN = re.compile(r"\s*(\w+\s*=\s*\d+\s*)?")


class TextWorldExpressSettings(EnvSettings):
    """Choice of the game, and settings of the JVM that runs it."""

    variant_key: ClassVar[str] = "game"

    game: GameName = "coin"
    """kind of game"""
    params: str = ""
    """parameters of the game, such as numLocations=4,includeDoors=0; others keep their defaults"""
    val_split: Literal["dev", "test"] = "dev"
    """fold of the library that is used for validation"""
    list_actions: bool = True
    """list the possible actions at the end of observations"""
    heap_mb: Annotated[int, Ge(64)] = 256
    """maximum heap size of the JVM in MB"""
    java_options: str = ""
    """further options of the JVM"""

    @field_validator("params")
    @classmethod
    def _check_params(cls, params: str) -> str:
        for name_and_value in params.split(","):  # check here: the library ignores invalid pairs
            if not PARAMETER_PATTERN.fullmatch(name_and_value):
                raise UserError(
                    f"{name_and_value!r} is not name=integer; allowed: name=integer,...; "
                    "fix: numLocations=4",
                    "invalid_syntax",
                )
        return params
