"""Runs the file and the commands of ``docs/write_environment.md`` outside the repository, with
short training.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import ROOT, Job
from verl.record.tracking import read_metrics
from verl.trainer.cli import CHECKED_NOTE

TIMEOUT_S = 400
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]
PAGE = (ROOT / "docs" / "write_environment.md").read_text()
FILE = re.compile(r"^```python (\w+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMANDS = re.compile(r"^```sh run\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Appended to the overrides of the page, where the last value counts: the full run takes minutes.
SHORT = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.num_threads=1",
    "data.train_batch_size=2",
    "env.val_tasks=4",
    "cold_start.overrides=['data.episodes=96','data.val_episodes=0','trainer.num_threads=1']",
)
TRAINS = "verl.trainer.main_ppo"


def list_commands() -> list[list[str]]:
    """Return the words of each command of the page, in order."""
    text = "".join(COMMANDS.findall(PAGE)).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def user_directory(tmp_path_factory) -> Path:
    """Run all commands of the page; return the user's directory."""
    home = tmp_path_factory.mktemp("user")
    for name, code in FILE.findall(PAGE):
        (home / name).write_text(code)
    for number, arguments in enumerate(list_commands()):
        short = SHORT if TRAINS in arguments else ()
        job = Job([sys.executable, *arguments[1:], *short], home / f"{number}.log", cwd=home)
        job.finish(TIMEOUT_S)
        assert job.left_over(20) == []
    return home


def read_output(directory: Path, part: str) -> str:
    """Return the output of the last command with ``part`` among its words."""
    numbers = [number for number, arguments in enumerate(list_commands()) if part in arguments]
    return (directory / f"{numbers[-1]}.log").read_text()


def test_page_has_a_file_and_commands_of_every_kind():
    assert [name for name, _ in FILE.findall(PAGE)] == ["letters.py"]
    assert all(arguments[0] == "python" for arguments in list_commands())
    arguments = [argument for arguments in list_commands() for argument in arguments]
    for argument in ("check", "--check", TRAINS, "scripts.show_trajectory"):
        assert argument in arguments


def test_environment_passes_the_check(user_directory):
    output = read_output(user_directory, "check")
    assert "oracle" in output and "WRONG" not in output


def test_configuration_passes_the_check(user_directory):
    assert CHECKED_NOTE in read_output(user_directory, "--check")


def test_training_makes_a_policy_and_trains_it(user_directory):
    assert (user_directory / "data" / "models" / "letters" / "config.json").is_file()
    run = user_directory / "runs" / "letters" / "rlvcr"
    metrics = read_metrics(run)
    assert [record["step"] for record in metrics] == [0, 1, 2]
    assert all("val/success_rate" in metrics[step] for step in (0, 2))
    assert "letters" in (run / "report.html").read_text()
    assert (user_directory / "runs" / "letters" / "sft" / "metrics.jsonl").is_file()


def test_trajectory_can_be_printed(user_directory):
    assert "<action>" in read_output(user_directory, "scripts.show_trajectory")
