"""Scripts for users: trajectories, policies, cluster jobs. ``dev`` has development tools."""
