"""Single-turn prompts from files. A row is a task; its answer is graded with its ground truth."""
