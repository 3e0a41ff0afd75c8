"""Recall: read pages of arrows one by one, and tell at the end where one of them leads."""
