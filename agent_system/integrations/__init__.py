"""Adapters with which other trainers use these environments, one package per trainer."""
