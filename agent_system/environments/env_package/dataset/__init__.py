"""Single-turn prompts from files: a row is a task, an answer is graded against the row's truth."""
