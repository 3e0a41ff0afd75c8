"""Exam: an episode is a series of reasoning-gym questions, and the first wrong answer ends it."""
