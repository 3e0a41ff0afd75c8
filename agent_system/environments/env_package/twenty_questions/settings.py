"""The ``env.twenty_questions`` section."""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import model_validator

from agent_system.environments.env_package.twenty_questions.knowledge import unknown_words
from agent_system.environments.settings import EnvSettings
from verl.config.settings import NonNegative, PositiveInt, Refusal


class GameSettings(EnvSettings):
    """The secret words and who answers; all keys below ``gamemaster`` are of the server."""

    words: tuple[str, ...] = ()
    """secret words; none: those of the shipped table"""
    clues: Annotated[int, Ge(0), Le(2)] = 0
    """things that hold for the word with which every game opens; where there are any, held out is a
    quarter of them, or of their pairs, instead of a quarter of the words"""
    prompt: Literal["full", "compact"] = "full"
    """full: rules and answer format for chat models; compact: observations alone, for policies made
    by imitation"""
    gamemaster: Literal["embedded", "openai"] = "embedded"
    """who answers: the shipped table, or a server with OpenAI's interface"""
    base_url: str = ""
    """address of the server"""
    model: str = ""
    """model that the server is asked for"""
    api_key_env: str = "OPENAI_API_KEY"
    """environment variable that holds the key of the server"""
    # All attempts together have to be done within env.step_timeout_s.
    timeout_s: NonNegative = 6.0
    """seconds for one request to the server"""
    attempts: PositiveInt = 4
    """requests to the server before an answer is given up"""

    @model_validator(mode="after")
    def _words_are_known(self) -> "GameSettings":
        unknown = unknown_words(self.words) if self.gamemaster == "embedded" else []
        if unknown:
            why = f"the embedded gamemaster does not know {', '.join(unknown)}"
            fix = "take such words, or a gamemaster that knows them"
            raise Refusal("words", why, "words of knowledge.txt", fix)
        return self
