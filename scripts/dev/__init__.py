"""Development tools: benchmarks, mutation and chaos runners, and chores of the repository."""
