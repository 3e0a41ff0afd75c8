"""Experts of environments, and the demonstrations that they make."""
