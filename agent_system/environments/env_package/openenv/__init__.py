"""Environments of OpenEnv, in the environment process or on a server."""
