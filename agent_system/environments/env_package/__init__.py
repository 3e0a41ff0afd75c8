"""One folder per environment; each declares a ``PACKAGE`` of type
``agent_system.environments.package.EnvPackage``.
"""
