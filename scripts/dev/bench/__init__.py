"""Benchmarks that measure ratios within one run. Each prints a Markdown table."""
