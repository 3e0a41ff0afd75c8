"""Environments that are made for OpenEnv: in this process, or behind a server of theirs."""
