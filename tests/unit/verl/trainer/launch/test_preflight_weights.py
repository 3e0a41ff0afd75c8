"""Every command refuses a damaged policy before anything is started: status 2, key, names, fix."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.config.load import load_config
from verl.trainer import main_eval, main_generation, main_ppo, main_sft
from verl.trainer.launch import generation
from verl.trainer.launch.preflight import start_problems

QUERY = "model.layers.0.self_attn.q_proj.weight"
POLICY = "actor_rollout_ref.model.path"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def policy(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "policy"))


def change(directory, name, value):
    weights = load_file(directory / "model.safetensors")
    weights |= {name: value}
    save_file({n: t for n, t in weights.items() if t is not None}, directory / "model.safetensors")


def lose_tokenizer(directory):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).unlink(missing_ok=True)


DAMAGE = {
    "missing": (lambda d: change(d, QUERY, None), QUERY),
    "unexpected": (lambda d: change(d, "odd.weight", torch.ones(2)), "odd.weight"),
    "shape": (lambda d: change(d, QUERY, torch.ones(2)), QUERY),
    "nan": (lambda d: change(d, QUERY, torch.full((64, 64), torch.nan)), QUERY),
    "no tokenizer": (lose_tokenizer, "tokenizer"),
    "tokenizer too large": (
        lambda d: make_tiny_tokenizer(450).save_pretrained(d),
        "400",
    ),
}


def commands(policy, tmp_path):
    rows = tmp_path / "rows.jsonl"
    message = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(json.dumps({"prompt": "a", "messages": message}) + "\n")
    number_line = [f"{POLICY}={policy}", "env.env_name=number_line"]
    return {
        "ppo": (POLICY, lambda: main_ppo.main([*number_line, "--check"])),
        "eval": (POLICY, lambda: main_eval.main([*number_line, "--check"])),
        "sft": (
            "model.path",
            lambda: main_sft.main(
                [f"model.path={policy}", f"data.train_files=[{rows}]", "--check"]
            ),
        ),
        "generation": (
            "model.path",
            lambda: main_generation.main([f"model.path={policy}", f"data.path={rows}"]),
        ),
    }


@pytest.mark.parametrize("command", ["ppo", "eval", "sft", "generation"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_policy_is_refused(policy, tmp_path, capsys, monkeypatch, damage, command):
    monkeypatch.setattr(generation, "create_engine", lambda *_, **__: pytest.fail("it was started"))
    make, why = DAMAGE[damage]
    make(policy)
    key, run = commands(policy, tmp_path)[command]
    assert run() == 2
    problem = capsys.readouterr().err
    assert f"{key}='{policy}': " in problem and why in problem
    assert "; allowed: " in problem and "; fix: " in problem


def test_critic_and_reward_model_are_checked(policy, sound, tmp_path):
    words = [f"{POLICY}={sound}", "env.env_name=number_line", "algorithm.adv_estimator=gae"]
    cfg = load_config("ppo_trainer", [*words, f"critic.model.path={policy}"])
    assert start_problems(cfg) == []
    change(policy, QUERY, None)
    (problem,) = start_problems(cfg)
    assert problem.startswith(f"critic.model.path='{policy}': ") and QUERY in problem


@pytest.mark.parametrize(
    ("modules", "problems"),
    [
        ("all-linear", 0),
        ("[q_proj,lm_head]", 1),
        ("[embed_tokens]", 1),
        ("[]", 1),
        ("null", 1),
        ("3", 1),
        ("[q_porj,void]", 2),
    ],
)
def test_modules_that_lora_cannot_adapt_are_refused(sound, modules, problems):
    model = "actor_rollout_ref.model"
    words = [f"{POLICY}={sound}", "env.env_name=number_line", f"{model}.lora_rank=4"]
    found = start_problems(
        load_config("ppo_trainer", [*words, f"{model}.target_modules={modules}"])
    )
    assert len(found) == problems
    assert all(text.startswith(f"{model}.target_modules=") and "q_proj" in text for text in found)
