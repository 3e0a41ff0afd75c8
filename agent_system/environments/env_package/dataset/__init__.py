"""Single-turn tasks from files. A row contains a prompt and the ground truth of its answer."""
