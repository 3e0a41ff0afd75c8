"""The ``env.textarena`` section."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from agent_system.environments.settings import EnvSettings
from verl.utils.settings import PositiveInt


class TextArenaSettings(EnvSettings):
    """Which game is played; a number that shapes another game changes nothing."""

    variant_key: ClassVar[str] = "game"

    game: Literal["GuessTheNumber", "FrozenLake", "LightsOut", "Mastermind"] = "GuessTheNumber"
    """TextArena's name of the game"""
    max_turns: PositiveInt = 20
    """valid moves after which a game is lost"""
    max_number: Annotated[int, Ge(8)] = 100
    """largest number of GuessTheNumber"""
    size: Annotated[int, Ge(3), Le(9)] = 4
    """cells per side of FrozenLake and LightsOut"""
    num_holes: PositiveInt = 3
    """holes of FrozenLake"""
    code_length: Annotated[int, Ge(2)] = 4
    """digits of a code of Mastermind"""
    num_numbers: Annotated[int, Ge(2)] = 6
    """different digits of Mastermind"""
    train_games: PositiveInt = 200
    """starts to train on; a small game has fewer"""
    val_games: PositiveInt = 50
    """starts held out; a small game has fewer"""
    list_actions: bool = False
    """end observations with the possible moves"""
