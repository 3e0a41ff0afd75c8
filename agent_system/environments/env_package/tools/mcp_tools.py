"""Tools of MCP servers that communicate on standard input and output.

A server runs as a subprocess. A thread with an event loop exchanges messages with it.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from agent_system.environments.env_package.tools.settings import McpServer
from agent_system.environments.env_package.tools.toolbox import Tool
from verl.utils.limits import lift_memory_limit

T = TypeVar("T")
START_TIMEOUT_S = 30.0  # timeout for the start of a server, and for the list of its tools
CLOSE_TIMEOUT_S = 10.0  # timeout for the end of a server


class McpToolError(RuntimeError):
    """Error: the server answered with an error, or did not answer in time."""


class McpTool(Tool):
    """Tool of an MCP server. The server validates the arguments."""

    def __init__(self, server: "McpConnection", name: str, description: str, schema: Any) -> None:
        super().__init__(name, description, schema)
        self._server = server

    def run(self, arguments: dict[str, Any]) -> Any:
        """Call the tool on its server. Raises ``McpToolError``."""
        return self._server.call(self.name, arguments)


class McpConnection:
    """Connection to a running MCP server.

    Raises ``McpToolError`` if the server does not start, or does not have a tool of
    ``server.tools``. Raises ``ModuleNotFoundError`` if ``mcp`` is not installed.
    """

    def __init__(self, server: McpServer, timeout_s: float) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client

        self._session_class = ClientSession
        self._open_streams = stdio_client
        self._parameters = StdioServerParameters(
            command=server.command, args=server.args, env=server.env or None
        )
        self._timeout_s = timeout_s
        self._event_loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._event_loop.run_forever, daemon=True, name="mcp"
        )
        self._thread.start()
        self._session_future: asyncio.Future[Any] = self._event_loop.create_future()
        self._stop_event = asyncio.Event()
        try:
            # The memory limit of this process is only for graders. Lift it, so that the server does
            # not inherit it.
            with lift_memory_limit():
                self._server_future = asyncio.run_coroutine_threadsafe(
                    self._run_session(), self._event_loop
                )
                self._session = self._run_coroutine(self._wait_for_session(), START_TIMEOUT_S)
            self.tools = self._list_tools(server)
        except BaseException:
            self.close()
            raise

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call tool ``name``. Return its structured content, or its text if it has none."""
        result = self._run_coroutine(self._session.call_tool(name, arguments), self._timeout_s)
        text = "\n".join(block.text for block in result.content if hasattr(block, "text"))
        if result.is_error:
            raise McpToolError(text)
        structured_content = result.structured_content
        # Unwrap the result. The protocol wraps values that are no objects into {"result": ...}.
        if isinstance(structured_content, dict) and set(structured_content) == {"result"}:
            return structured_content["result"]
        return text if structured_content is None else structured_content

    def close(self) -> None:
        """Stop the server and the thread of its event loop."""
        if not self._thread.is_alive():
            return
        self._event_loop.call_soon_threadsafe(self._stop_event.set)
        try:
            self._server_future.result(timeout=CLOSE_TIMEOUT_S)
        except Exception:  # environment boundary: cancel the session if the server does not end
            self._server_future.cancel()
        self._event_loop.call_soon_threadsafe(self._event_loop.stop)
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    async def _run_session(self) -> None:
        # The library requires that the same coroutine opens and closes the connection.
        try:
            async with (
                self._open_streams(self._parameters) as (read_stream, write_stream),
                self._session_class(read_stream, write_stream) as session,
            ):
                await session.initialize()
                self._session_future.set_result(session)
                await self._stop_event.wait()
        except BaseException as error:
            if not self._session_future.done():
                self._session_future.set_exception(
                    McpToolError(f"{self._parameters.command}: {error!r}")
                )
            raise

    async def _wait_for_session(self) -> Any:
        return await asyncio.shield(self._session_future)

    def _list_tools(self, server: McpServer) -> list[McpTool]:
        tools = self._run_coroutine(self._session.list_tools(), START_TIMEOUT_S).tools
        missing_names = sorted(set(server.tools) - {tool.name for tool in tools})
        if missing_names:
            raise McpToolError(
                f"env.tools.mcp_servers: {server.command} has no tool {', '.join(missing_names)}; "
                f"allowed: {', '.join(tool.name for tool in tools)}; fix: correct the list tools"
            )
        return [
            McpTool(self, tool.name, tool.description or "", tool.input_schema)
            for tool in tools
            if not server.tools or tool.name in server.tools
        ]

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise McpToolError(f"no answer within {timeout_s:g} s") from error
