"""Registered plans, their results, and the tools that run and summarise them."""
