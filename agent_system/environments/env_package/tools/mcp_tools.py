"""Tools of MCP servers on standard input and output.

A server runs as a subprocess. A thread with an event loop communicates with it.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from agent_system.environments.env_package.tools.settings import McpServer
from agent_system.environments.env_package.tools.toolbox import Tool
from verl.utils.limits import lift_memory_limit

T = TypeVar("T")
START_TIMEOUT_S = 30.0  # timeout of the start of a server, and of the list of its tools
CLOSE_TIMEOUT_S = 10.0  # timeout of the end of a server


class McpToolError(RuntimeError):
    """The server answered with an error, or did not answer in time."""


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

    Raises ``McpToolError`` if the server does not start or lacks a tool, and
    ``ModuleNotFoundError`` if ``mcp`` is not installed.
    """

    def __init__(self, server: McpServer, timeout_s: float) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client

        self._session_type = ClientSession
        self._connect = stdio_client
        self._parameters = StdioServerParameters(
            command=server.command, args=server.args, env=server.env or None
        )
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="mcp")
        self._thread.start()
        self._ready: asyncio.Future[Any] = self._loop.create_future()
        self._stop = asyncio.Event()
        try:
            # Lift the memory limit of this process, which the server would inherit. It is only
            # meant for graders.
            with lift_memory_limit():
                self._serving = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
                self._session = self._wait(self._wait_ready(), START_TIMEOUT_S)
            self.tools = self._list_tools(server)
        except BaseException:
            self.close()
            raise

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the result of tool ``name``: its structured content, or else its text."""
        answer = self._wait(self._session.call_tool(name, arguments), self._timeout_s)
        text = "\n".join(block.text for block in answer.content if hasattr(block, "text"))
        if answer.is_error:
            raise McpToolError(text)
        content = answer.structured_content
        # The protocol wraps a result that is no object into {"result": ...}.
        if isinstance(content, dict) and set(content) == {"result"}:
            return content["result"]
        return text if content is None else content

    def close(self) -> None:
        """Stop the server and the thread of its event loop."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        try:
            self._serving.result(timeout=CLOSE_TIMEOUT_S)
        except Exception:  # environment boundary: cancel a server that does not end
            self._serving.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    async def _serve(self) -> None:
        # The library requires that one coroutine opens and closes the connection.
        try:
            async with (
                self._connect(self._parameters) as (read_stream, write_stream),
                self._session_type(read_stream, write_stream) as session,
            ):
                await session.initialize()
                self._ready.set_result(session)
                await self._stop.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(McpToolError(f"{self._parameters.command}: {error!r}"))
            raise

    async def _wait_ready(self) -> Any:
        return await asyncio.shield(self._ready)

    def _list_tools(self, server: McpServer) -> list[McpTool]:
        tools = self._wait(self._session.list_tools(), START_TIMEOUT_S).tools
        missing = sorted(set(server.tools) - {tool.name for tool in tools})
        if missing:
            raise McpToolError(
                f"env.tools.mcp_servers: {server.command} has no tool {', '.join(missing)}; "
                f"allowed: {', '.join(tool.name for tool in tools)}; fix: correct the list tools"
            )
        return [
            McpTool(self, tool.name, tool.description or "", tool.input_schema)
            for tool in tools
            if not server.tools or tool.name in server.tools
        ]

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise McpToolError(f"no answer within {timeout_s:g} s") from error
