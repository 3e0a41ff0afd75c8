"""Report what this machine can run: ``python -m verl.doctor [--no-smoke]``."""

import sys

from verl.trainer.launch.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
