"""Sokoban: push every box onto a target; levels made here by playing backwards, seen as text or as
an image.

``settings`` the section · ``levels`` generation · ``render`` text and images · ``package`` the
environment.
"""
