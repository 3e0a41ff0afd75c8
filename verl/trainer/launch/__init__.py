"""Construction of runs: only this package of ``verl`` imports ``agent_system`` and ``rlvcr``."""
