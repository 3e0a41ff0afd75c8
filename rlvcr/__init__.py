"""RLVCR: an agent chooses one of four thinking levels per turn and gets credit for the choice."""
