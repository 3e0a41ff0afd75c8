"""Recall: read pages of codes one by one, and tell one of the codes at the end."""
