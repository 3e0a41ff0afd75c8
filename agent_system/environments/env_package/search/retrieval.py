"""Where documents come from: BM25 over the world, or a retrieval server over HTTP."""

import json
from functools import lru_cache
from typing import Any, Protocol

from agent_system.environments.bm25 import KeywordIndex
from agent_system.environments.env_package.search.world import build
from verl.utils.proxies import describe_proxy, trusts_proxies

Passage = tuple[str, str]  # title, text
FIRST_WAIT_S = 0.2  # between attempts
LONGEST_WAIT_S = 2.0


class RetrievalError(RuntimeError):
    """The retrieval server did not give what was asked for; the message names it and says why."""


class Retriever(Protocol):
    """Finds passages."""

    def search(self, query: str, topk: int) -> list[Passage]:
        """The best passages for ``query``, best first."""
        ...


@lru_cache(maxsize=1)
def _index() -> tuple[list[Passage], KeywordIndex]:
    # Titles are searched too: questions name things by them.
    passages = list(build()[0].items())
    return passages, KeywordIndex([f"{title} {text}" for title, text in passages])


class LocalRetriever:
    """BM25 over the documents of ``world``; the index is shared in a process."""

    def search(self, query: str, topk: int) -> list[Passage]:
        """See ``Retriever``."""
        passages, index = _index()
        return [passages[position] for position in index.top(query, topk)]


class RemoteRetriever:
    """Asks the server at ``url``, as Search-R1's answer: a POST of ``queries``, ``topk`` and
    ``return_scores``.

    The reply holds ``result``: for every query a list of ``{"document": {"contents":
    "title\\ntext"}, "score": ..}``. No connection, no reply within ``timeout_s`` and the status
    codes 5xx and 429 are tried again, up to ``attempts`` times in all. Raises ``RetrievalError``.
    """

    def __init__(self, url: str, timeout_s: float, attempts: int) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.attempts = attempts

    def search(self, query: str, topk: int) -> list[Passage]:
        """See ``Retriever``."""
        reply = self._post({"queries": [query], "topk": topk, "return_scores": True})
        try:
            # Servers that know no scores give documents without the wrapping in ``document``. What
            # is more than ``topk`` is cut off, for a server may give what it likes.
            return [
                _passage(item.get("document", item)["contents"]) for item in reply["result"][0]
            ][:topk]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._error(
                f"answered something else than passages: {str(reply)[:200]}"
            ) from error

    def _post(self, question: dict[str, Any]) -> Any:
        import httpx
        import tenacity

        again = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=tenacity.wait_exponential(FIRST_WAIT_S, max=LONGEST_WAIT_S),
            retry=tenacity.retry_if_exception(_may_pass),
            reraise=True,
        )
        try:
            return again(self._ask, question)
        # ImportError: httpx cannot speak to the kind of proxy that the environment names.
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError) as error:
            tries = again.statistics["attempt_number"]
            raise self._error(
                f"gave no answer in {tries} attempts{describe_proxy(self.url)} "
                f"({type(error).__name__}: {error})"
            ) from error

    def _ask(self, question: dict[str, Any]) -> Any:
        import httpx

        reply = httpx.post(
            self.url,
            # Encoded here: httpx cannot send half a surrogate pair, which a policy may write.
            content=json.dumps(question).encode(),
            headers={"Content-Type": "application/json"},
            timeout=self.timeout_s,
            follow_redirects=True,
            trust_env=trusts_proxies(self.url),
        )
        reply.raise_for_status()
        return reply.json()

    def _error(self, what: str) -> RetrievalError:
        return RetrievalError(f"env.search.search_url={self.url}: the retrieval server {what}")


def _may_pass(error: BaseException) -> bool:
    """Whether it is worth asking again."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        # Cases that time does not heal, such as 404 or a broken URL, fail at the first attempt.
        status = error.response.status_code
        return status >= 500 or status == 429
    return isinstance(
        error,
        (httpx.NetworkError, httpx.ProxyError, httpx.RemoteProtocolError, httpx.TimeoutException),
    )


def _passage(contents: str) -> Passage:
    # Half a surrogate pair, which no tokenizer takes, becomes a question mark.
    contents = contents.encode("utf-8", "replace").decode()
    title, _, text = contents.partition("\n")
    return title.strip().strip('"'), text.strip()
