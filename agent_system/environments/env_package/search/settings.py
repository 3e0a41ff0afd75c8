"""The ``env.search`` section."""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import field_validator

from agent_system.environments.settings import EnvSettings


class SearchSettings(EnvSettings):
    """Where passages come from, how answers are paid, and which questions are asked."""

    search_url: str | None = None
    """retrieval server that is asked for passages; null: BM25 over the world of the package"""
    topk: Annotated[int, Ge(1), Le(20)] = 3
    """passages per search"""
    timeout: Annotated[float, Ge(0.01)] = 5.0
    """seconds for one request to the server"""
    retries: Annotated[int, Ge(0), Le(10)] = 3
    """further requests after one that failed"""
    max_chars: Annotated[int, Ge(40)] = 500
    """characters of a passage; a longer one is cut"""
    reward: Literal["em", "f1"] = "em"
    """em: 1.0 for the exact answer; f1: the overlap of words"""
    max_hops: Annotated[int, Ge(1), Le(2)] = 2
    """documents that a question needs, at most"""
    train_questions: str | None = None
    """Parquet or JSON-lines file (question, answers or golden_answers; or env_kwargs.question and
    reward_model.ground_truth.target) in place of the own questions"""
    val_questions: str | None = None
    """Parquet or JSON-lines file as train_questions, to validate on"""

    @field_validator("search_url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("no address; allowed: a URL that begins with http(s)://")
        return url

    def file_key(self, split: str) -> str | None:
        """See ``EnvSettings``."""
        return "val_questions" if split == "val" else "train_questions"
