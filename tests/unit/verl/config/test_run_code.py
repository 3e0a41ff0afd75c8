"""Nothing that a run's stored configuration names is executed without being asked for."""

from typing import Any

import pytest

import verl.trainer.launch.extensions  # noqa: F401  (plugs the sections of environments in)
from verl.config.plugins import schema_keys
from verl.config.run_code import code_keys, refuse_stored_code
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError
from verl.trainer.launch.audit import audit_words


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
    "env.agent.path": "evil.py:play",
    "env.agent.tasks": "evil.py:tasks",
    "env.dataset.reward.path": "evil.py",
    "ray_init.runtime_env": {"worker_process_setup_hook": "evil.f"},
}


@pytest.mark.parametrize("path", CODE)
def test_code_is_refused_by_its_key(path, tmp_path):
    stored = nested(path, CODE[path])
    assert code_keys(stored) == [path]
    with pytest.raises(ConfigError, match=path):
        refuse_stored_code(stored, "run")
    refuse_stored_code(stored, "run", [path])


@pytest.mark.parametrize("words, refused", [([], True), (["trust_run_code=true"], False)])
def test_an_audit_asks_before_it_executes_code(tmp_path, words, refused):
    (tmp_path / "config.yaml").write_text("custom_reward_function: {path: evil.py}\n")
    if refused:
        with pytest.raises(ConfigError, match="custom_reward_function"):
            audit_words([str(tmp_path), *words])
    else:
        assert "trust_run_code=true" not in audit_words([str(tmp_path), *words])


def test_defaults_and_names_are_no_code():
    assert code_keys(PPOConfig().model_dump(mode="json")) == []
    assert code_keys(nested("env.env_name", "reasoning_gym/chain_sum")) == []


def test_keys_that_sound_like_code_are_marked():
    names = ("trust_remote_code", "external_lib", "functions", "mcp_servers", "runtime_env")
    keys = schema_keys(PPOConfig).values()
    unmarked = [key.path for key in keys if key.name in names and not key.runs_code]
    files = [key.path for key in keys if "Python file" in key.doc and not key.runs_code]
    assert unmarked == files == []
