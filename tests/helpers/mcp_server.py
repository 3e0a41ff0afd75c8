"""A tiny MCP server on standard input and output: adds, fails, sleeps, tells its bound."""

import resource
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tiny")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def fail(reason: str) -> str:
    """Always an error."""
    raise ToolError(reason)


@server.tool()
def sleep(seconds: float) -> str:
    """Answers late."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def bound() -> int:
    """How many bytes of address space there are for the server."""
    return resource.getrlimit(resource.RLIMIT_AS)[0]


if __name__ == "__main__":
    server.run()
