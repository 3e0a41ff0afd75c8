"""Research tools: audit of the credit for thinking levels, replays, and rules that force levels."""
