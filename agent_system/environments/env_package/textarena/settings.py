"""The ``env.textarena`` section."""

from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from agent_system.environments.env_package.textarena.games import GAMES
from agent_system.environments.settings import EnvSettings, FunctionFromFile, Placement
from verl.config.settings import PositiveInt


class TextArenaSettings(EnvSettings):
    """Which game is played; a number that shapes another game changes nothing."""

    variant_key: ClassVar[str] = "game"

    game: str = "GuessTheNumber"
    """GuessTheNumber, FrozenLake, LightsOut, Mastermind, or TextArena's name of another game, as in
    env.env_name=textarena/TicTacToe-v0"""
    opponent: FunctionFromFile = FunctionFromFile()
    """function move(text, rng) of the user's own that plays the other seat of a game for two; null:
    moves at random"""
    max_turns: PositiveInt | None = None
    """valid moves after which a game is lost; null: 20 in the four games named above,
    TextArena's own limits in others"""
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

    def own_placement(self) -> Placement | None:
        """Of the four puzzles a move is cheap. An opponent may be the user's own code, or try many
        moves out.
        """
        puzzle = self.game in GAMES and self.opponent.path is None
        return self.placement or (None if puzzle else "process")
