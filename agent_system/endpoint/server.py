"""HTTP server of the endpoint. It listens on loopback and requires the key of a running episode."""

import asyncio
import contextlib
import json
import logging
import resource
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from agent_system.endpoint.chat_completions import (
    MODEL_NAME,
    ChatRequest,
    Reply,
    RequestRefusedError,
    SamplingRules,
    build_value_refusal,
    read_request,
)
from agent_system.reward_manager.scores import read_finite_number

LOOPBACK = "127.0.0.1"
API_KEY_BYTES = 32  # random bytes of the API key of a session
MAX_CONNECTIONS = 4096  # upper bound of the number of open connections
MAX_BODY_BYTES = 16 * 1024 * 1024  # bytes of a request: several times the longest context
BODY_TIMEOUT_S = 60.0  # seconds to receive the whole body of a request
KEEPALIVE_TIMEOUT_S = 60.0  # seconds that a connection stays open without a complete request
ACCEPT_QUEUE_LENGTH = 1024  # connections that wait to be accepted
CLOSE_TIMEOUT_S = 1.0  # seconds to finish open responses when the server closes
BEARER_PREFIX = "Bearer "
CLOSING_STATUSES = (401, 408)  # HTTP statuses after which the server closes the connection
# Tell clients not to retry after a failure: the same request would fail again.
NO_RETRY_HEADER = {"x-should-retry": "false"}

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """URL, API key and model name with which the agent of one episode calls the policy."""

    base_url: str
    api_key: str
    model: str


class EndpointSession(Protocol):
    """One running episode of an agent; its requests have the API key of the session."""

    @property
    def rules(self) -> SamplingRules:
        """Return the sampling settings of the session's turns."""
        ...

    async def chat(self, request: ChatRequest) -> Reply:
        """Sample the turn that answers ``request``. Raises ``RequestRefusedError``."""
        ...

    def finish(self, reward: float, won: bool) -> None:
        """End the episode with return ``reward``. ``won``: True for a success."""
        ...


class EndpointServer:
    """Server of chat requests; the API key selects the session. Use it within one asyncio loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, EndpointSession] = {}
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._connection_limiter: ConnectionLimiter | None = None
        self._start_lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def register_session(self, session: EndpointSession) -> AsyncIterator[EndpointAddress]:
        """Context manager that serves ``session`` under a new API key and yields its address.

        The key is valid until the reward is posted or the ``with`` block ends.
        """
        base_url = await self._ensure_listening()
        key = secrets.token_urlsafe(API_KEY_BYTES)
        self._sessions[key] = session
        try:
            yield EndpointAddress(base_url, key, MODEL_NAME)
        finally:
            self._sessions.pop(key, None)

    async def close(self) -> None:
        """Stop the server. A second call has no effect."""
        listener, self._listener = self._listener, None
        runner, self._runner = self._runner, None
        if listener is not None:
            listener.close()
        if runner is not None:
            await runner.cleanup()

    async def _ensure_listening(self) -> str:
        """Start to listen if the server does not listen yet; return the base URL."""
        async with self._start_lock:
            if self._listener is None:
                self._listener = await self._start_listening()
        return f"http://{LOOPBACK}:{self._listener.sockets[0].getsockname()[1]}/v1"

    async def _start_listening(self) -> asyncio.Server:
        runner = web.AppRunner(
            self._build_app(),
            logger=logger,
            access_log=None,
            handler_cancellation=True,
            # Do not decompress bodies: a small one could expand to gigabytes.
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            shutdown_timeout=CLOSE_TIMEOUT_S,
        )
        await runner.setup()
        assert runner.server is not None  # set by setup()
        self._runner = runner
        self._connection_limiter = ConnectionLimiter(runner.server)
        loop = asyncio.get_running_loop()
        return await loop.create_server(
            self._connection_limiter, LOOPBACK, 0, backlog=ACCEPT_QUEUE_LENGTH
        )

    def _build_app(self) -> web.Application:
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[_convert_errors_to_responses]
        )
        app.router.add_post("/v1/chat/completions", self._handle_chat)
        app.router.add_post("/v1/reward", self._handle_reward)
        app.router.add_get("/v1/models", self._handle_models)
        return app

    async def _handle_chat(self, request: web.Request) -> web.Response:
        session = self._sessions[self._authenticate_request(request)]
        chat_request = read_request(await _read_body(request), session.rules)
        reply = await session.chat(chat_request)
        return web.json_response(reply.build_completion_body())

    async def _handle_models(self, request: web.Request) -> web.Response:
        session = self._sessions[self._authenticate_request(request)]
        common_fields = {"object": "model", "created": 0, "owned_by": "rlvcr"}
        model_entries = [{"id": name, **common_fields} for name in session.rules.models]
        return web.json_response({"object": "list", "data": model_entries})

    async def _handle_reward(self, request: web.Request) -> web.Response:
        self._authenticate_request(request)
        reward, won = read_reward(await _read_body(request))
        # Check the key again: another reward may have arrived while this body was read.
        key = self._authenticate_request(request)
        self._sessions.pop(key).finish(reward, won)
        return web.json_response({"reward": reward, "won": won})

    def _authenticate_request(self, request: web.Request) -> str:
        """Return the key in the header of ``request``, or raise ``RequestRefusedError``."""
        header = request.headers.get("Authorization", "")
        key = header.removeprefix(BEARER_PREFIX)
        if not header.startswith(BEARER_PREFIX) or key not in self._sessions:
            raise RequestRefusedError(
                "api_key: no episode in flight has this key; allowed: the key that the agent "
                "received, until its reward is posted; fix: api_key=<that key>",
                status=401,
                code="invalid_api_key",
            )
        if self._connection_limiter is not None:
            self._connection_limiter.mark_connection_authenticated(request)
        return key


def _strip_request_error_traceback(record: logging.LogRecord) -> bool:
    """Remove the traceback from the log record of a malformed request (logging filter)."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg = f"{record.getMessage()}: {' '.join(str(error).split())}"
        record.args, record.exc_info, record.levelno = (), None, logging.WARNING
        record.levelname = logging.getLevelName(logging.WARNING)
    return True


logger.addFilter(_strip_request_error_traceback)


class ConnectionLimiter:
    """Protocol factory of an HTTP server that limits the number of its open connections.

    It is passed to ``loop.create_server`` and wraps an aiohttp ``web.Server``. Without a limit,
    clients without a key could use up all file descriptors of the process. At most half of the
    descriptors and at most ``MAX_CONNECTIONS`` are used. A further connection replaces the oldest
    one that never sent a request with a valid key. If there is none, the new connection is closed
    immediately.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_unlimited = soft_limit == resource.RLIM_INFINITY
        self._max_connections = (
            MAX_CONNECTIONS if is_unlimited else min(MAX_CONNECTIONS, soft_limit // 2)
        )
        self._trusted_connections: set[RequestHandler] = set()

    def __call__(self) -> asyncio.Protocol:
        """Return the asyncio protocol object for a new connection."""
        connections = self._server.connections
        self._trusted_connections.intersection_update(connections)
        if len(connections) < self._max_connections:
            return self._server()
        # The connections are in the order of opening: close the oldest one without a valid key.
        for connection in connections:
            if connection not in self._trusted_connections:
                connection.force_close()
                return self._server()
        return _RejectedConnection()

    def mark_connection_authenticated(self, request: web.BaseRequest) -> None:
        """Record that the connection of ``request`` has sent a valid key.

        The server does not close it when the limit of open connections is reached.
        """
        self._trusted_connections.add(request.protocol)


class _RejectedConnection(asyncio.Protocol):
    """Asyncio protocol that closes a new connection immediately."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def read_reward(body: Mapping[str, Any]) -> tuple[float, bool]:
    """Parse the reward and the success in ``body``. Raises ``RequestRefusedError``.

    Without the key ``won``, the episode is a success if the reward is above 0.
    """
    for key, value in body.items():
        if key not in ("reward", "won"):
            raise build_value_refusal(key, value, "unknown key", "`reward`, `won`", f"remove {key}")
    value = body.get("reward")
    try:
        reward = read_finite_number(value, "reward")
    except (TypeError, ValueError):
        fix = "reward=0.0"
        raise build_value_refusal("reward", value, "not a reward", "a finite number", fix) from None
    won = body.get("won", reward > 0)
    if not isinstance(won, bool):
        raise build_value_refusal("won", won, "not a boolean", "true, false", "remove `won`")
    return reward, won


async def _read_body(request: web.Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            # Ignore the charset: JSON is UTF-8, and some decoders take quadratic time.
            body = json.loads(await request.read())
    except TimeoutError as error:
        message = (
            f"body: incomplete after {BODY_TIMEOUT_S:g} s; allowed: at most {MAX_BODY_BYTES} bytes "
            "within that time; fix: send the whole request"
        )
        raise RequestRefusedError(message, status=408) from error
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        message = f"body: not JSON ({error}); allowed: a JSON object; fix: send a JSON object"
        raise RequestRefusedError(message) from error
    if not isinstance(body, dict):
        allowed, fix = "a JSON object", "send a JSON object"
        raise build_value_refusal("body", body, "not a JSON object", allowed, fix)
    return body


@web.middleware
async def _convert_errors_to_responses(
    request: web.Request, handler: Handler
) -> web.StreamResponse:
    """Convert refusals and HTTP errors to error responses in OpenAI's format."""
    try:
        return await handler(request)
    except RequestRefusedError as refusal:
        return _build_error_response(refusal)
    except web.HTTPException as error:
        message = (
            f"{request.method} {request.path}: {error.reason}; allowed: POST /v1/chat/completions, "
            f"GET /v1/models, POST /v1/reward, at most {MAX_BODY_BYTES} bytes; fix: use one of "
            "these"
        )
        return _build_error_response(RequestRefusedError(message, status=error.status))


def _build_error_response(refusal: RequestRefusedError) -> web.Response:
    response = web.json_response(
        refusal.build_error_body(), status=refusal.status, headers=NO_RETRY_HEADER
    )
    if refusal.status in CLOSING_STATUSES:
        response.force_close()
    return response
