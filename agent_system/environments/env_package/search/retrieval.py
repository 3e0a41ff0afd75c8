"""Retrieval of documents: BM25 over the fictional world, or a retrieval server over HTTP."""

import json
from functools import lru_cache
from typing import Any

from agent_system.environments.bm25 import KeywordIndex
from agent_system.environments.env_package.search.settings import (
    FIRST_RETRY_WAIT_S,
    MAX_RETRY_WAIT_S,
)
from agent_system.environments.env_package.search.world import build_corpus_and_questions
from verl.utils.proxies import describe_proxy, uses_proxy_variables

Passage = tuple[str, str]  # title, text


class RetrievalError(RuntimeError):
    """Error: the retrieval server returned no passages. The message states URL and reason."""


@lru_cache(maxsize=1)
def _load_passages_and_index() -> tuple[list[Passage], KeywordIndex]:
    # Index the titles too, because questions contain them.
    passages = list(build_corpus_and_questions()[0].items())
    return passages, KeywordIndex([f"{title} {text}" for title, text in passages])


def search_world(query: str, topk: int) -> list[Passage]:
    """Return the ``topk`` passages of the fictional world that fit ``query`` best, best first."""
    passages, index = _load_passages_and_index()
    return [passages[position] for position in index.find_best_texts(query, topk)]


class RemoteRetriever:
    """Client of a retrieval server with Search-R1's API.

    A request is a POST of ``queries``, ``topk`` and ``return_scores``. The reply holds ``result``:
    for each query a list of ``{"document": {"contents": "title\\ntext"}, "score": ..}``.

    A failed connection, a timeout of ``timeout_s`` seconds and the status codes 5xx and 429 are
    retried, up to ``attempts`` attempts in total. Raises ``RetrievalError``.
    """

    def __init__(self, url: str, timeout_s: float, attempts: int) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.attempts = attempts

    def search(self, query: str, topk: int) -> list[Passage]:
        reply = self._post_with_retries({"queries": [query], "topk": topk, "return_scores": True})
        try:
            # Servers that ignore ``return_scores`` return documents without the key ``document``.
            # Some servers return more than ``topk`` passages, so cut the list.
            return [
                _parse_passage(item.get("document", item)["contents"])
                for item in reply["result"][0]
            ][:topk]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._make_error(f"returned no list of passages: {str(reply)[:200]}") from error

    def _post_with_retries(self, request: dict[str, Any]) -> Any:
        import httpx
        import tenacity

        retry_call = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=tenacity.wait_exponential(FIRST_RETRY_WAIT_S, max=MAX_RETRY_WAIT_S),
            retry=tenacity.retry_if_exception(_is_temporary_error),
            reraise=True,
        )
        try:
            return retry_call(self._send_request, request)
        # httpx raises ImportError if it cannot use the proxy of the environment variables.
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError) as error:
            attempt_count = retry_call.statistics["attempt_number"]
            raise self._make_error(
                f"did not answer in {attempt_count} attempts{describe_proxy(self.url)} "
                f"({type(error).__name__}: {error})"
            ) from error

    def _send_request(self, request: dict[str, Any]) -> Any:
        import httpx

        reply = httpx.post(
            self.url,
            # Use ``json.dumps``, which escapes lone surrogates in a query. httpx cannot send them.
            content=json.dumps(request).encode(),
            headers={"Content-Type": "application/json"},
            timeout=self.timeout_s,
            follow_redirects=True,
            trust_env=uses_proxy_variables(self.url),
        )
        reply.raise_for_status()
        return reply.json()

    def _make_error(self, problem: str) -> RetrievalError:
        return RetrievalError(f"env.search.search_url={self.url}: the retrieval server {problem}")


def _is_temporary_error(error: BaseException) -> bool:
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        # Other status codes, such as 404, are permanent errors.
        status_code = error.response.status_code
        return status_code >= 500 or status_code == 429
    return isinstance(
        error,
        (httpx.NetworkError, httpx.ProxyError, httpx.RemoteProtocolError, httpx.TimeoutException),
    )


def _parse_passage(contents: str) -> Passage:
    # Replace lone surrogates by question marks, because tokenizers refuse them.
    contents = contents.encode("utf-8", "replace").decode()
    title, _, text = contents.partition("\n")
    return title.strip().strip('"'), text.strip()
