"""Trainers and their command lines."""
