"""Measurements as ratios within one run; each prints a markdown table."""
