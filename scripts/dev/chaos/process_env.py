"""Number line environment that runs in worker processes, into which faults can be injected."""

from dataclasses import replace

import scripts.dev.chaos.inject  # noqa: F401  an environment worker imports no external_lib
from agent_system.environments.env_package.number_line.package import PACKAGE, NumberLineEnv


class ProcessNumberLineEnv(NumberLineEnv):
    """``NumberLineEnv`` that runs in an environment worker process."""

    placement = "process"


LINE = replace(PACKAGE, make=ProcessNumberLineEnv)
