"""Environments, one package each. Every package declares ``PACKAGE``, an ``EnvPackage``."""
