"""Plans of experiments, written before their runs, with their results, and tools to run them."""
