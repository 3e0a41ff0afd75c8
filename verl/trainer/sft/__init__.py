"""Supervised training on weighted token rows: rows, batches and the training loop."""
