"""Environment packages, one per environment. Each declares an ``EnvPackage`` named ``PACKAGE``."""
