"""Research tools: credit audit, and rules that choose the thinking level instead of the policy."""
