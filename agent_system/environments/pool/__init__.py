"""Processes and threads that run environments, with a deadline for every call."""
