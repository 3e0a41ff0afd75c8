"""Settings of the config section ``env.textarena``."""

from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from agent_system.environments.env_package.textarena.games import GAMES
from agent_system.environments.settings import EnvSettings, FunctionFromFile, Placement
from verl.config.settings import PositiveInt


class TextArenaSettings(EnvSettings):
    """Choice of the game and its parameters. Parameters of all other games have no effect."""

    variant_key: ClassVar[str] = "game"

    game: str = "GuessTheNumber"
    """GuessTheNumber, FrozenLake, LightsOut, Mastermind, or TextArena's name of another game, as in
    env.env_name=textarena/TicTacToe-v0"""
    opponent: FunctionFromFile = FunctionFromFile()
    """user-provided function move(text, rng) that moves for the opponent in games for two; null:
    random moves"""
    max_turns: PositiveInt | None = None
    """number of valid moves after which a game ends without success; null: 20 in the four games
    named above, TextArena's limits in others"""
    max_number: Annotated[int, Ge(8)] = 100
    """largest number in GuessTheNumber"""
    size: Annotated[int, Ge(3), Le(9)] = 4
    """cells per side in FrozenLake and LightsOut"""
    num_holes: PositiveInt = 3
    """number of holes in FrozenLake"""
    code_length: Annotated[int, Ge(2)] = 4
    """digits of a code in Mastermind"""
    num_numbers: Annotated[int, Ge(2)] = 6
    """number of different digits in Mastermind"""
    train_games: PositiveInt = 200
    """number of training starts; small games have fewer"""
    val_games: PositiveInt = 50
    """number of validation starts; small games have fewer"""
    list_actions: bool = False
    """list the possible moves at the end of observations"""

    def chosen_placement(self) -> Placement | None:
        """Return ``placement`` if that is set, else the default for the game.

        The default is None (that of the environment class) for puzzles without user-provided
        opponent, because their moves are cheap. For other games it is ``process``: an opponent may
        be user-provided code or try many moves.
        """
        is_puzzle = self.game in GAMES and self.opponent.path is None
        return self.placement or (None if is_puzzle else "process")
