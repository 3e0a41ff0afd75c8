"""Recall: read pages of arrows (``a>f``) one by one, and tell at the end where one arrow leads."""
