"""Research tools: credit audit, replays with another thinking level, rules that force levels."""
