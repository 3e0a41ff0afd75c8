"""Scripts for users: print, export and replay trajectories, make policies, submit cluster jobs.

The package ``dev`` has development tools.
"""
