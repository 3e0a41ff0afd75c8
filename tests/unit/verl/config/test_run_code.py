"""No code that a stored run configuration names is executed without consent."""

from typing import Any

import pytest

import verl.trainer.launch.extensions  # noqa: F401  (registers the sections of environments)
from tests.helpers.refusals import has_problem, mentions
from verl.config.plugins import collect_all_keys
from verl.config.run_code import find_keys_that_name_code, refuse_code_in_stored_config
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError
from verl.trainer import main_audit, main_eval, main_ppo
from verl.trainer.cli import parse


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


CODE = {
    "actor_rollout_ref.model.trust_remote_code": True,
    "actor_rollout_ref.model.external_lib": "evil",
    "actor_rollout_ref.rollout.name": "evil:Engine",
    "actor_rollout_ref.rollout.engine_kwargs": {"worker_cls": "evil.Worker"},
    "critic.model.external_lib": "evil",
    "reward_model.model.trust_remote_code": True,
    "reward_model.reward_manager": "evil.py:Manager",
    "custom_reward_function.path": "evil.py",
    "data.custom_cls.path": "evil.py",
    "env.env_name": "evil:PACKAGE",
    "env.kwargs.functions": ["evil.py:f"],
    "env.kwargs.opponent.path": "evil.py",
    "env.tools.functions": ["evil.py:f"],
    "env.tools.mcp_servers": [{"command": "sh"}],
    "env.agent.path": "evil.py:run_episode",
    "env.agent.tasks": "evil.py:tasks",
    "env.dataset.reward.path": "evil.py",
    "ray_init.runtime_env": {"worker_process_setup_hook": "evil.f"},
}


@pytest.mark.parametrize("path", CODE)
def test_code_is_refused_by_its_key(path, tmp_path):
    stored = nested(path, CODE[path])
    assert find_keys_that_name_code(stored) == [path]
    with pytest.raises(ConfigError, check=has_problem("untrusted_code", "run", path)):
        refuse_code_in_stored_config(stored, "run")
    refuse_code_in_stored_config(stored, "run", [path])


REFERENCES = {
    "env.env_name": "${trainer.project_name}",
    "custom_reward_function": "${env.kwargs}",
    "data": "${env.kwargs}",
    "actor_rollout_ref.model.trust_remote_code": "${trainer.val_only}",
}


@pytest.mark.parametrize("path", REFERENCES)
def test_reference_that_can_resolve_to_code_counts_as_code(path):
    assert find_keys_that_name_code(nested(path, REFERENCES[path])) == [path]


COMMANDS = {
    "ppo": (PPOConfig, "custom_reward_function: {path: evil.py}"),
    "dotted": (PPOConfig, "custom_reward_function.path: evil.py"),
    "joined": (PPOConfig, "defaults: [below@custom_reward_function]"),
    "sft": (SFTConfig, "model: {trust_remote_code: true}"),
}


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("run_file", ["env.json", "metrics.jsonl", "rollouts", "checkpoints"])
def test_config_of_a_run_may_not_name_code(tmp_path, kind, run_file):
    schema, text = COMMANDS[kind]
    (tmp_path / "config.yaml").write_text(f"{text}\n")
    (tmp_path / "below.yaml").write_text("path: evil.py\n")
    (tmp_path / run_file).touch()
    arguments = ["-cp", str(tmp_path), "-cn", "config"]
    with pytest.raises(ConfigError, check=mentions("trust_run_code=true")):
        parse(arguments, schema=schema)
    if kind not in ("dotted", "joined"):
        for trust in ("trust_run_code=true", "--trust-run-code"):
            assert parse([*arguments, trust], schema=schema).configs


def test_config_of_the_user_may_name_code(tmp_path):
    (tmp_path / "config.yaml").write_text("custom_reward_function: {path: mine.py}\n")
    assert parse(["-cp", str(tmp_path), "-cn", "config"]).configs


@pytest.mark.parametrize("main", [main_ppo.main, main_eval.main, main_audit.main])
def test_every_command_refuses_code_without_consent(tmp_path, capsys, main):
    (tmp_path / "config.yaml").write_text("custom_reward_function: {path: evil.py}\n")
    if main is not main_audit.main:
        (tmp_path / "env.json").touch()
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')\n")
    arguments = (
        [str(tmp_path)] if main is main_audit.main else ["-cp", str(tmp_path), "-cn", "config"]
    )
    assert main([*arguments, "--check"]) == 2
    assert "custom_reward_function.path" in capsys.readouterr().err


def test_defaults_and_plain_names_are_no_code():
    assert find_keys_that_name_code(PPOConfig().model_dump(mode="json")) == []
    assert find_keys_that_name_code(nested("env.env_name", "reasoning_gym/chain_sum")) == []


def test_keys_that_name_code_are_marked():
    names = ("trust_remote_code", "external_lib", "functions", "mcp_servers", "runtime_env")
    keys = collect_all_keys(PPOConfig).values()
    unmarked = [key.path for key in keys if key.name in names and not key.code_annotation]
    files = [key.path for key in keys if "Python file" in key.help_text and not key.code_annotation]
    assert unmarked == files == []
