"""Settings of the config section ``env.search``."""

from collections.abc import Mapping
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import field_validator

from agent_system.environments.settings import EnvSettings, compute_longest_wait
from verl.config.settings.errors import UserError

FIRST_RETRY_WAIT_S = 0.2  # seconds between the first two attempts; the wait doubles each time
MAX_RETRY_WAIT_S = 2.0  # upper bound of the wait between two attempts


class SearchSettings(EnvSettings):
    """Source of passages, reward of answers and choice of questions."""

    search_url: str | None = None
    """address of a retrieval server; null: BM25 over the fictional world of this package"""
    topk: Annotated[int, Ge(1), Le(20)] = 3
    """passages per search"""
    timeout: Annotated[float, Ge(0.01)] = 5.0
    """timeout of one request to the server in seconds"""
    retries: Annotated[int, Ge(0), Le(10)] = 3
    """further attempts after a failed request"""
    max_chars: Annotated[int, Ge(40)] = 500
    """maximum number of characters of a passage; longer ones are cut"""
    reward: Literal["em", "f1"] = "em"
    """em: 1.0 for the exact answer, else 0.0; f1: word overlap with the answer"""
    max_hops: Annotated[int, Ge(1), Le(2)] = 2
    """maximum number of documents that a question needs"""
    train_questions: str | None = None
    """Parquet or JSON-lines file (question, answers or golden_answers; or env_kwargs.question and
    reward_model.ground_truth.target); null: questions about the fictional world"""
    val_questions: str | None = None
    """file of validation questions, in the format of train_questions"""

    @field_validator("search_url")
    @classmethod
    def _check_search_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise UserError(
                "not an HTTP address; allowed: a URL that begins with http(s)://; "
                "fix: http://127.0.0.1:8000/retrieve",
                "invalid_syntax",
            )
        return url

    def get_files_key(self, split: str) -> str | None:
        return "val_questions" if split == "val" else "train_questions"

    def list_max_step_waits(self) -> Mapping[str, float]:
        if self.search_url is None:
            return {}
        wait_s = compute_longest_wait(
            1 + self.retries, self.timeout, FIRST_RETRY_WAIT_S, MAX_RETRY_WAIT_S
        )
        return {"timeout": wait_s}
