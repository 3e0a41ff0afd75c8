"""Benchmarks. Most compare two programs within one run and print a table."""
