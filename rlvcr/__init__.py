"""RLVCR: at every step an agent chooses how much to think, and is credited for the choice."""
