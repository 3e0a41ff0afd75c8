"""Agents that act in environments: environments, tokens, memory and the trajectory collector."""
