"""Number line: the smallest environment, used in tests and as a template for new ones."""
