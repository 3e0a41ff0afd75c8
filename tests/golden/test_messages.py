"""The wording of messages equals the golden file."""

import subprocess
import sys

from tests.golden.messages import GOLDEN


def test_messages_of_configurations_and_files_equal_the_golden_file():
    # Use a separate process, because other tests register names that the messages list.
    command = [sys.executable, "-m", "tests.golden.messages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert GOLDEN.read_text() == done.stdout, "python -m tests.golden.messages"
