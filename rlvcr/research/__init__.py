"""Research tools: audit of the credit for thinking levels, and rules that force levels."""
