"""Questions that are answered with the help of functions: Python ones, and those of MCP servers."""
