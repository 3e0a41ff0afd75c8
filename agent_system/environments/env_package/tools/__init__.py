"""Questions that the policy answers by calling tools: Python functions and tools of MCP servers."""
