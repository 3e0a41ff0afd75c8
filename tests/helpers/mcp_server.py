"""Tiny MCP server on standard input and output: adds, fails, sleeps, reports its memory limit."""

import resource
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tiny")


@server.tool()
def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    return a + b


@server.tool()
def fail(reason: str) -> str:
    """Always raise an error."""
    raise ToolError(reason)


@server.tool()
def sleep(seconds: float) -> str:
    """Answer after ``seconds``."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def get_memory_limit() -> int:
    """Return the limit of the server's address space in bytes."""
    return resource.getrlimit(resource.RLIMIT_AS)[0]


if __name__ == "__main__":
    server.run()
