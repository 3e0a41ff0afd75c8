"""Recall: see shelves of numbered things one by one, and take one thing at the end."""
