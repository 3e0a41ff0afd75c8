"""Settings of ``env.twenty_questions``: words, prompts and gamemaster."""

from collections.abc import Mapping
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import model_validator

from agent_system.environments.env_package.twenty_questions.knowledge import find_unknown_words
from agent_system.environments.settings import PromptSettings, compute_longest_wait
from verl.config.settings import InvalidSettingError, NonNegative, PositiveInt

FIRST_RETRY_PAUSE_S = 0.5  # seconds between the first two requests; the pause doubles each time
MAX_RETRY_PAUSE_S = 8.0


class TwentyQuestionsSettings(PromptSettings):
    """Secret words, prompts and gamemaster.

    The keys after ``gamemaster`` are parameters of its server, for ``gamemaster=openai``.
    """

    words: tuple[str, ...] = ()
    """secret words; empty: all words of the shipped table"""
    clues: Annotated[int, Ge(0), Le(2)] = 0
    """number of attributes of the word that every game starts with; above 0, a quarter of the
    attributes or of their pairs is held out, instead of a quarter of the words"""
    gamemaster: Literal["embedded", "openai"] = "embedded"
    """source of the answers: the shipped table, or an OpenAI-compatible server"""
    base_url: str = ""
    """base URL of the server"""
    model: str = ""
    """name of the model on the server"""
    api_key_env: str = "OPENAI_API_KEY"
    """environment variable that contains the API key of the server"""
    timeout_s: NonNegative = 6.0
    """timeout of one request to the server, in seconds"""
    attempts: PositiveInt = 4
    """requests to the server before the episode fails"""

    @model_validator(mode="after")
    def _require_known_words(self) -> "TwentyQuestionsSettings":
        needs_knowledge_table = self.gamemaster == "embedded" or self.clues > 0
        unknown_words = find_unknown_words(self.words) if needs_knowledge_table else []
        if unknown_words:
            words_text = ", ".join(unknown_words)
            reason = f"the embedded gamemaster does not know {words_text}"
            fix = "use such words, or a gamemaster that knows them"
            if self.gamemaster != "embedded":
                reason = (
                    f"clues={self.clues} are attributes in knowledge.yaml, which lacks {words_text}"
                )
                fix = "use such words, or env.twenty_questions.clues=0"
            raise InvalidSettingError("words", reason, "words of knowledge.yaml", fix)
        return self

    def list_max_step_waits(self) -> Mapping[str, float]:
        if self.gamemaster == "embedded":
            return {}
        pauses_s = (FIRST_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S, FIRST_RETRY_PAUSE_S)
        return {"timeout_s": compute_longest_wait(self.attempts, self.timeout_s, *pauses_s)}
