"""Tools of MCP servers that communicate on standard input and output.

A server runs as a subprocess. A thread with an event loop exchanges messages with it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from agent_system.environments.env_package.tools.settings import McpServer
from agent_system.environments.env_package.tools.toolbox import Tool, ToolServerLostError
from verl.utils.limits import lift_memory_limit

T = TypeVar("T")
START_TIMEOUT_S = 30.0  # timeout for the start of a server, and for the list of its tools


class McpToolError(RuntimeError):
    """Error: the server answered with an error, or did not answer in time."""


class McpTool(Tool):
    """Tool of an MCP server. The server validates the arguments."""

    def __init__(self, server: "McpConnection", name: str, description: str, schema: Any) -> None:
        super().__init__(name, description, schema)
        self._server = server

    def run(self, arguments: dict[str, Any]) -> Any:
        return self._server.call_tool(self.name, arguments)


class McpConnection:
    """Connection to a running MCP server.

    Raises ``McpToolError`` if the server does not start, or does not have a tool of
    ``server.tools``.
    """

    def __init__(self, server: McpServer, timeout_s: float) -> None:
        from anyio.from_thread import start_blocking_portal

        self._command = server.command
        self._timeout_s = timeout_s
        self._open_contexts = contextlib.ExitStack()
        try:
            self._portal = self._open_contexts.enter_context(start_blocking_portal(name="mcp"))
            # The memory limit of this process is only for graders. Lift it, so that the server does
            # not inherit it.
            with lift_memory_limit():
                session_context = self._portal.wrap_async_context_manager(_open_session(server))
                self._session = self._open_contexts.enter_context(session_context)
            self.tools = self._list_tools(server)
        except BaseException:
            self.close()
            raise

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call tool ``name``. Return its structured content, or its text if it has none.

        Raises ``McpToolError``, and ``ToolServerLostError`` if the server has ended.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            call_result = self._call_session(
                self._session.call_tool, name, arguments, timeout_s=self._timeout_s
            )
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            raise ToolServerLostError(f"{self._command}: the server has ended") from error
        text = "\n".join(
            content_block.text
            for content_block in call_result.content
            if hasattr(content_block, "text")
        )
        if call_result.is_error:
            raise McpToolError(text)
        structured_content = call_result.structured_content
        # Unwrap the result. The protocol wraps values that are no objects into {"result": ...}.
        if isinstance(structured_content, dict) and set(structured_content) == {"result"}:
            return structured_content["result"]
        return text if structured_content is None else structured_content

    def close(self) -> None:
        self._open_contexts.close()

    def _list_tools(self, server: McpServer) -> list[McpTool]:
        tools = self._call_session(self._session.list_tools, timeout_s=START_TIMEOUT_S).tools
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

    def _call_session(self, method: Callable[..., Awaitable[T]], *args: Any, timeout_s: float) -> T:
        future = self._portal.start_task_soon(method, *args)
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise McpToolError(f"no answer within {timeout_s:g} s") from error


@contextlib.asynccontextmanager
async def _open_session(server: McpServer) -> AsyncIterator[Any]:
    from mcp import ClientSession, StdioServerParameters, stdio_client

    parameters = StdioServerParameters(
        command=server.command, args=server.args, env=server.env or None
    )
    try:
        async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
            async with asyncio.timeout(START_TIMEOUT_S):
                await session.initialize()
            yield session
    except Exception as error:  # environment boundary
        raise McpToolError(f"{server.command}: {error!r}") from error
