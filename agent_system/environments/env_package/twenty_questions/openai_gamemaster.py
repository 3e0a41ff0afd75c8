"""Gamemaster on an OpenAI-compatible HTTP server. Imported only if the settings select it."""

import os

from agent_system.environments.env_package.twenty_questions.gamemaster import GamemasterError
from agent_system.environments.env_package.twenty_questions.settings import (
    FIRST_RETRY_PAUSE_S,
    MAX_RETRY_PAUSE_S,
)
from verl.utils.proxies import describe_proxy, uses_proxy_variables

try:
    import httpx
    import tenacity
except ModuleNotFoundError as error:
    raise ImportError(
        f"gamemaster=openai needs the module {error.name!r}; fix: install the extra with "
        "pip install -e '.[envs]'"
    ) from error

RETRIED_STATUS_CODES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class _RetryableError(Exception):
    """Error: temporary failure of a request, which is repeated."""


class OpenAIGamemaster:
    """Gamemaster that queries ``POST {base_url}/chat/completions`` of a server, for example vLLM.

    The API key is read from the environment variable ``api_key_env``, if it is set. Connection
    errors, timeouts (``timeout_s`` seconds) and the status codes in ``RETRIED_STATUS_CODES`` are
    retried with growing pauses, up to ``attempts`` requests. A call raises ``GamemasterError`` if
    no request gets an answer.
    """

    remote = True  # a call waits for a server

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str = "OPENAI_API_KEY",
        timeout_s: float = 6.0,
        attempts: int = 4,
        pause_s: float = FIRST_RETRY_PAUSE_S,
    ) -> None:
        if not base_url or not model:
            raise ValueError(
                f"base_url={base_url!r} model={model!r}: gamemaster=openai needs both; fix: set "
                "env.twenty_questions.base_url and env.twenty_questions.model"
            )
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        self.model = model
        key = os.environ.get(api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.Client(
                timeout=timeout_s, headers=headers, trust_env=uses_proxy_variables(self.url)
            )
        # httpx raises these errors if it cannot use the proxy of the environment variables.
        except (ImportError, ValueError) as error:
            raise GamemasterError(f"{self.url}{describe_proxy(self.url)}: {error}") from error
        self._retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(attempts),
            wait=tenacity.wait_exponential_jitter(
                initial=pause_s, max=MAX_RETRY_PAUSE_S, jitter=pause_s
            ),
            retry=tenacity.retry_if_exception_type(_RetryableError),
            reraise=True,
        )
        self._attempts = attempts

    def __call__(self, prompt: str) -> str:
        """Return the server's reply. Raises ``GamemasterError`` with the URL and the cause."""
        try:
            return self._retrying.copy()(self._send_request, prompt)
        except _RetryableError as error:
            raise GamemasterError(
                f"{self.url}: no answer in {self._attempts} attempts"
                f"{describe_proxy(self.url)}: {error}"
            ) from error

    def close(self) -> None:
        self._client.close()

    def _send_request(self, prompt: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            # Decode greedily, so that equal questions get equal answers.
            "temperature": 0,
            "max_tokens": 8,
        }
        try:
            response = self._client.post(self.url, json=body)
        except httpx.TransportError as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from error
        if response.status_code in RETRIED_STATUS_CODES:
            raise _RetryableError(f"status {response.status_code}: {response.text[:200]}")
        if response.status_code != 200:
            raise GamemasterError(
                f"{self.url}: status {response.status_code}: {response.text[:200]}"
            )
        try:
            return str(response.json()["choices"][0]["message"]["content"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise GamemasterError(
                f"{self.url}: the response is no chat completion: {response.text[:200]}"
            ) from error
