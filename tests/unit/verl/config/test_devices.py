"""A config is checked for a machine that is stated, wherever it is checked."""

import pytest

from verl.config.devices import Machine, parse_machine
from verl.config.settings import ConfigError
from verl.trainer import cli

GPU = "alfworld_qwen2.5_1.5b_8gpu"


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("8xH100", Machine(1, 8, "H100", 79.6)),
        ("2x8xh100:80GiB", Machine(2, 8, "h100", 80.0)),
        ("1xMyCard:24", Machine(1, 1, "MyCard", 24.0)),
        ("4xA100-40GB", Machine(1, 4, "A100-40GB", 39.6)),
        ("2x4xL40S:44.5GB", Machine(2, 4, "L40S", 44.5)),
    ],
)
def test_devices_are_read(text, machine):
    assert parse_machine(text) == machine


@pytest.mark.parametrize(
    "text", ["", "H100", "0xH100", "8", "8xA100", "8xUnheard", "8xH100:0", "8xH100:1.2.3", "8 H100"]
)
def test_what_states_no_devices_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_machine(text)
    assert "; allowed: " in str(caught.value) and "; fix: " in str(caught.value)


def run(capsys, *words: str):
    asked: list[bool] = []

    def inspect(cfg, elsewhere=False):
        asked.append(elsewhere)
        return cli.Inspection()

    def start(cfg):
        raise AssertionError("started")

    status = cli.run(start, argv=list(words), inspect=inspect)
    return status, asked, *capsys.readouterr()


def test_a_config_of_eight_gpus_is_planned_for_them(capsys):
    status, asked, out, _ = run(capsys, "--config-name", GPU, "--check", "--on", "8xH100")
    assert status == 0 and asked == [True]
    assert "cuda, 8 training ranks" in out and "1 x 8 x H100 with 79.6 GiB" in out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--config-name", GPU, "--check", "--on", "4xH100"), "trainer.n_gpus_per_node"),
        (
            ("--config-name", f"{GPU[:-4]}8gpu", "trainer.nnodes=2", "--check", "--on", "8xH100"),
            "trainer.nnodes",
        ),
        (
            ("--config-name", GPU, "trainer.device=cpu", "--check", "--on", "8xH100"),
            "trainer.device",
        ),
        (("--config-name", GPU, "--on", "8xH100"), "--on 8xH100"),
    ],
)
def test_what_the_stated_machine_lacks_is_a_problem(words, key, capsys):
    status, asked, _, err = run(capsys, *words)
    assert status == 2 and not asked and f"  - {key}" in err


def test_without_them_this_machine_is_asked(capsys):
    assert run(capsys, "--config-name", GPU, "--check")[:2] == (0, [False])
