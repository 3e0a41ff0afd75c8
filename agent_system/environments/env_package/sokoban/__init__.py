"""Sokoban: push every box onto a target, with generated levels, as text or images."""
