"""Records of a run: run directory, journal, rollout log, trackers, console and report."""
