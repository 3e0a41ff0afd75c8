"""Connections without a valid key cannot shut out a trajectory."""

import asyncio
import contextlib
import logging

import aiohttp
import pytest

from agent_system.endpoint import server as server_module
from agent_system.endpoint.chat_completions import SamplingRules
from agent_system.endpoint.server import EndpointServer

MOST = 4


class Session:
    """A session that is never asked to sample."""

    rules = SamplingRules(1.0, 1.0, -1, 16)


@contextlib.asynccontextmanager
async def endpoint():
    """Yield the base URL, port and headers of a running endpoint."""
    server = EndpointServer()
    try:
        async with server.register_session(Session()) as address:  # type: ignore[arg-type]
            port = int(address.base_url.split(":")[2].split("/")[0])
            yield address.base_url, port, {"Authorization": f"Bearer {address.api_key}"}
    finally:
        await server.close()


@pytest.fixture
def limit_connections(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", MOST)


async def models_status(session: aiohttp.ClientSession, base_url: str, headers: dict) -> int:
    async with session.get(f"{base_url}/models", headers=headers) as response:
        return response.status


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 10) == b""
    return True


def test_silent_connections_are_closed_for_new_ones(limit_connections):
    async def main():
        async with endpoint() as (base_url, port, headers), aiohttp.ClientSession() as client:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MOST)]
            for _, writer in silent:
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            assert await models_status(client, base_url, headers) == 200
            assert await is_closed(silent[0][0])
            for _, writer in silent:
                writer.close()

    asyncio.run(main())


def test_connections_with_a_valid_key_stay_open(limit_connections):
    async def main():
        async with endpoint() as (base_url, port, headers), contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(aiohttp.ClientSession()) for _ in range(MOST)
            ]
            for client in clients:
                assert await models_status(client, base_url, headers) == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await is_closed(reader)
            writer.close()
            for client in clients:
                assert await models_status(client, base_url, headers) == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",  # no key
    ],
)
def test_connection_without_a_complete_valid_request_is_closed(monkeypatch, payload):
    monkeypatch.setattr(server_module, "KEEPALIVE_TIMEOUT_S", 0.2)

    async def main():
        async with endpoint() as (_, port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(payload)
            with contextlib.suppress(asyncio.IncompleteReadError):
                await asyncio.wait_for(reader.readuntil(b"never"), 10)
            assert reader.at_eof()
            writer.close()

    asyncio.run(main())


def test_malformed_request_is_logged_in_one_line(caplog):
    async def main():
        async with endpoint() as (_, port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n")
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 10)
            writer.close()

    asyncio.run(main())
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "127.0.0.1" in record.getMessage() and "no header" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_body_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(server_module, "BODY_TIMEOUT_S", 0.2)

    async def main():
        async with endpoint() as (_, port, headers):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            key = headers["Authorization"]
            head = f"POST /v1/reward HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n"
            writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            status_line = await asyncio.wait_for(reader.readline(), 10)
            assert b" 408 " in status_line
            writer.close()

    asyncio.run(main())
