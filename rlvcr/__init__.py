"""RLVCR: an agent chooses a thinking level in every turn and gets credit for that choice."""
