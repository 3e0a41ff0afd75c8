"""Experts (scripted policies) of environments, and the demonstrations that they make."""
