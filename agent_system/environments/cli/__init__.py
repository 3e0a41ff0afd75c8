"""Command line of environments: list names, check rewards, run an episode by hand."""
