"""The wording of messages is that of the golden file."""

import subprocess
import sys

from tests.golden.messages import GOLDEN


def test_messages_of_the_configuration_are_those_of_the_golden_file():
    # In a process of its own: other tests register names, which messages list.
    code = "import sys, tests.golden.messages as m; sys.stdout.write(m.config_section())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert GOLDEN.read_text().startswith(done.stdout), "python -m tests.golden.messages"
