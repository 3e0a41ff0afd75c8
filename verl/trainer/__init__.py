"""Trainers (PPO, supervised), their command lines and entry points."""
