"""What a run leaves behind: run directory, journal, rollout log, trackers, console and report."""
