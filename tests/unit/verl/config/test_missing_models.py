"""A missing model is refused with a fix that obtains this model and no other."""

import pytest

from verl.config.checkpoint_paths import find_related_checkpoint
from verl.config.checks.models import suggest_fix_for_missing_model
from verl.config.load import load_config
from verl.config.validate import find_problems

PATH = "actor_rollout_ref.model.path"
MAKE = "cold_start.enable=true"


@pytest.mark.parametrize("config", ["ppo_trainer", "quickstart", "small_policy"])
@pytest.mark.parametrize("key", [PATH, "critic.model.path", "reward_model.model.path"])
@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-1.5B-Instruct", "gpt2", "org/judge@main", "smollm2/x"]
)
def test_fix_for_a_hub_model_is_a_download_and_no_cold_start(config, key, name):
    fix = suggest_fix_for_missing_model(load_config(config, [f"{key}={name}"]), key)
    assert MAKE not in fix and "HF_HUB_OFFLINE=0" in fix
    assert f"hf download {name.split('@')[0]}" in fix and f"./{name}" in fix


@pytest.mark.parametrize(
    ("config", "key", "offered"),
    [
        ("quickstart", PATH, True),
        ("number_line", PATH, True),
        # No recipe of its own: quickstart_sft makes a policy for another environment.
        ("ppo_trainer", PATH, False),
        ("smollm2_alfworld", PATH, False),
        ("quickstart", "critic.model.path", False),
        ("quickstart", "reward_model.model.path", False),
    ],
)
def test_cold_start_is_offered_only_by_a_config_with_a_recipe(config, key, offered):
    overrides = [f"{key}=data/models/missing"]
    assert (MAKE in suggest_fix_for_missing_model(load_config(config, overrides), key)) == offered


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", True),
        ("gpt2", True),
        ("org/model@v1", True),
        ("./Qwen/Qwen2.5-1.5B-Instruct", False),
        ("data/models/mine", False),
        ("{}/mine", False),
    ],
)
def test_cold_start_refuses_a_path_that_looks_like_a_hub_name(path, refused, tmp_path):
    for config in ("ppo_trainer", "quickstart"):
        overrides = [f"{PATH}={path.format(tmp_path)}", "cold_start.enable=true"]
        problems = find_problems(load_config(config, overrides))
        assert [problem.partition("=")[0] for problem in problems] == ([PATH] if refused else [])


def test_fix_for_an_adapter_directory_names_the_key_of_adapters(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    cfg = load_config("ppo_trainer", ["env.env_name=number_line", f"{PATH}={tmp_path}"])
    (problem,) = [problem for problem in find_problems(cfg) if problem.code == "no_model"]
    assert f"actor_rollout_ref.model.lora_adapter_path={tmp_path}" in problem


def test_fix_for_a_missing_checkpoint_names_the_newest_one(tmp_path):
    for step in (3, 20):
        checkpoint = tmp_path / "checkpoints" / f"global_step_{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    newest = tmp_path / "checkpoints" / "global_step_20"
    for path in (
        tmp_path,
        newest.parent,
        newest,
        newest / "actor",
        newest.parent / "global_step_9",
    ):
        assert find_related_checkpoint(path) == newest
    assert find_related_checkpoint(tmp_path / "other") is None
