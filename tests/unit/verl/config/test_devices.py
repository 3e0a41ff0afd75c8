"""``--check --on MACHINE`` checks a config for the stated machine instead of this one."""

import pytest

from tests.helpers.refusals import allowed, fix
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
def test_machine_descriptions_are_parsed(text, machine):
    assert parse_machine(text) == machine


@pytest.mark.parametrize(
    "text", ["", "H100", "0xH100", "8", "8xA100", "8xUnheard", "8xH100:0", "8xH100:1.2.3", "8 H100"]
)
def test_malformed_machine_descriptions_are_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_machine(text)
    (problem,) = caught.value.problems
    assert problem.code in ("invalid_syntax", "unknown_name") and problem.key_path == "--on"
    assert allowed(problem) and fix(problem)


def run_cli(capsys, *arguments: str):
    elsewhere_flags: list[bool] = []

    def inspect(cfg, ignores_local_devices=False):
        elsewhere_flags.append(ignores_local_devices)
        return cli.PreflightResult()

    def start(cfg):
        raise AssertionError("started")

    status = cli.run(start, argv=list(arguments), preflight_check=inspect)
    return status, elsewhere_flags, *capsys.readouterr()


def test_eight_gpu_config_is_planned_for_the_stated_machine(capsys):
    status, flags, out, _ = run_cli(capsys, "--config-name", GPU, "--check", "--on", "8xH100")
    assert status == 0 and flags == [True]
    assert "cuda, 8 " in out and "1 x 8 x H100 with 79.6 GiB" in out


@pytest.mark.parametrize(
    ("arguments", "key"),
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
def test_resources_missing_on_the_stated_machine_are_problems(arguments, key, capsys):
    status, flags, _, err = run_cli(capsys, *arguments)
    assert status == 2 and not flags and f"  - {key}" in err


def test_without_on_this_machine_is_inspected(capsys):
    assert run_cli(capsys, "--config-name", GPU, "--check")[:2] == (0, [False])
