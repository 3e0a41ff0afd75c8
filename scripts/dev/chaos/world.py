"""The number line in processes of its own, so that there are environment workers to strike."""

from dataclasses import replace

import scripts.dev.chaos.strike  # noqa: F401  an environment worker imports no external_lib
from agent_system.environments.env_package.number_line.package import PACKAGE, NumberLineEnv


class ProcessLine(NumberLineEnv):
    """``NumberLineEnv`` in a worker process."""

    placement = "process"


LINE = replace(PACKAGE, make=ProcessLine)
