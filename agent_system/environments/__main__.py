"""Command line of environments: ``python -m agent_system.environments list``, ``check NAME`` and
``play NAME``.
"""

import sys

from agent_system.environments.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
