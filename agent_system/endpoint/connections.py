"""Limit on the connections of the endpoint.
Without it, clients without a key could use up all file descriptors of the process.
"""

import asyncio
import resource

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

MOST_CONNECTIONS = 4096


class BoundedConnections:
    """Protocol factory for ``loop.create_server`` around an aiohttp ``web.Server``.

    At most ``most`` connections are open. A further one replaces the oldest connection that never
    sent a request with a valid key. If there is none, the new connection is closed immediately.
    """

    def __init__(self, server: web.Server, max_connections: int | None = None) -> None:
        self._server = server
        self._most = max_connections or _default_limit()
        self._trusted: set[RequestHandler] = set()

    def __call__(self) -> asyncio.Protocol:
        """Return the asyncio protocol object for a new connection."""
        # In the order in which the connections were opened.
        connections = self._server.connections
        self._trusted.intersection_update(connections)
        if len(connections) < self._most:
            return self._server()
        oldest = next(
            (connection for connection in connections if connection not in self._trusted), None
        )
        if oldest is None:
            return _Rejected()
        oldest.force_close()
        return self._server()

    def trust_connection(self, request: web.BaseRequest) -> None:
        """Note that the connection of ``request`` has sent a valid key."""
        self._trusted.add(request.protocol)


class _Rejected(asyncio.Protocol):
    """Protocol of a connection that is closed immediately."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _default_limit() -> int:
    """Return half of the file descriptors that this process may open, at most 4096."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft // 2))
