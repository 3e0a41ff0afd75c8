"""Every command refuses a damaged policy before the start, with status 2, key, tensor names and
fix."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.config.load import load_config
from verl.config.schema import PPOConfig, SFTConfig
from verl.trainer import main_eval, main_generation, main_ppo, main_sft
from verl.trainer.launch import generation
from verl.trainer.launch.preflight import run_preflight_checks
from verl.trainer.launch.preflight_sft import find_sft_problems

QUERY = "model.layers.0.self_attn.q_proj.weight"
POLICY = "actor_rollout_ref.model.path"


def find_start_problems(cfg: PPOConfig) -> list[str]:
    """Return the problems that ``run_preflight_checks`` finds."""
    return list(run_preflight_checks(cfg).problems)


@pytest.fixture(scope="module")
def intact_policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def policy(intact_policy, tmp_path):
    return Path(shutil.copytree(intact_policy, tmp_path / "policy"))


def change_weight(directory, name, value):
    weights = load_file(directory / "model.safetensors")
    weights |= {name: value}
    save_file({n: t for n, t in weights.items() if t is not None}, directory / "model.safetensors")


def remove_tokenizer(directory):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).unlink(missing_ok=True)


def edit_json(file, change):
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def edit_tokenizer(directory, change):
    edit_json(directory / "tokenizer.json", lambda values: change(values["model"]))


DAMAGE = {
    "missing": (lambda d: change_weight(d, QUERY, None), QUERY),
    "unexpected": (lambda d: change_weight(d, "odd.weight", torch.ones(2)), "odd.weight"),
    "shape": (lambda d: change_weight(d, QUERY, torch.ones(2)), QUERY),
    "nan": (lambda d: change_weight(d, QUERY, torch.full((64, 64), torch.nan)), QUERY),
    "no tokenizer": (remove_tokenizer, "tokenizer"),
    "tokenizer of another kind": (
        lambda d: edit_tokenizer(d, lambda model: model.update(type="WordPiece")),
        "tokenizer.json",
    ),
    "merge of unknown tokens": (
        lambda d: edit_tokenizer(d, lambda model: model.update(merges=[["zq", "qz"]])),
        "tokenizer.json",
    ),
    "config value": (
        lambda d: edit_json(d / "config.json", lambda values: values.update(vocab_size="400")),
        "config.json",
    ),
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
def test_damaged_policy_is_refused(policy, tmp_path, capsys, monkeypatch, damage, command):
    monkeypatch.setattr(
        generation, "create_engine", lambda *_, **__: pytest.fail("the engine was started")
    )
    damage_policy, why = DAMAGE[damage]
    damage_policy(policy)
    key, run = commands(policy, tmp_path)[command]
    assert run() == 2
    problem = capsys.readouterr().err
    assert f"{key}='{policy}': " in problem and why in problem
    assert "; allowed: " in problem and "; fix: " in problem


def test_critic_weights_are_checked(policy, intact_policy):
    overrides = [
        f"{POLICY}={intact_policy}",
        "env.env_name=number_line",
        "algorithm.adv_estimator=gae",
    ]
    cfg = load_config("ppo_trainer", [*overrides, f"critic.model.path={policy}"])
    assert find_start_problems(cfg) == []
    change_weight(policy, QUERY, None)
    (problem,) = find_start_problems(cfg)
    assert problem.startswith(f"critic.model.path='{policy}': ") and QUERY in problem


def save_reward_model(directory, num_labels=1):
    config = Qwen2Config(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    config.num_labels = num_labels
    Qwen2ForSequenceClassification(config).save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (QUERY, None, QUERY),
        ("score.weight", None, "score.weight"),
        ("score.weight", torch.ones(2, 32), "score.weight"),
        ("score.weight", torch.full((1, 32), torch.nan), "score.weight"),
        ("model.odd", torch.ones(2), "model.odd"),
    ],
)
def test_reward_model_weights_are_checked(intact_policy, tmp_path, name, value, why):
    save_reward_model(tmp_path / "reward")
    path = "reward_model.model.path"
    overrides = [
        f"{POLICY}={intact_policy}",
        "env.env_name=number_line",
        "reward_model.enable=true",
    ]
    cfg = load_config("ppo_trainer", [*overrides, f"{path}={tmp_path / 'reward'}"])
    assert find_start_problems(cfg) == []
    change_weight(tmp_path / "reward", name, value)
    (problem,) = find_start_problems(cfg)
    assert problem.startswith(f"{path}='{tmp_path / 'reward'}': ") and why in problem


def test_reward_model_with_several_labels_is_refused(intact_policy, tmp_path):
    save_reward_model(tmp_path / "reward", num_labels=3)
    paths = [f"{POLICY}={intact_policy}", f"reward_model.model.path={tmp_path / 'reward'}"]
    cfg = load_config(
        "ppo_trainer", [*paths, "env.env_name=number_line", "reward_model.enable=true"]
    )
    (problem,) = find_start_problems(cfg)
    assert problem.startswith("reward_model.model.path=") and "3 labels" in problem


@pytest.mark.parametrize("tie", [True, False])
def test_tie_override_that_contradicts_config_json_is_refused(tmp_path, tie):
    policy = make_tiny_policy(tmp_path / "policy", tie=tie)
    key = "actor_rollout_ref.model.override_config"
    overrides = [f"{POLICY}={policy}", "env.env_name=number_line"]
    for value, count in ((tie, 0), (not tie, 1)):
        override = f"+{key}.tie_word_embeddings={value}"
        reported = find_start_problems(load_config("ppo_trainer", [*overrides, override]))
        assert len(reported) == count
        assert all(text.startswith(f"{key}.tie_word_embeddings=") for text in reported)
    sft = [f"model.path={policy}", "env.env_name=number_line"]
    override = f"+model.override_config.tie_word_embeddings={not tie}"
    (problem,) = find_sft_problems(load_config("sft_trainer", [*sft, override], SFTConfig))
    assert problem.startswith("model.override_config.tie_word_embeddings=")


@pytest.mark.parametrize(
    ("modules", "count"),
    [
        ("all-linear", 0),
        ("[q_proj,lm_head]", 1),
        ("[embed_tokens]", 1),
        ("[]", 1),
        ("null", 0),  # unset: all-linear
        ("3", 1),
        ("[q_porj,void]", 2),
    ],
)
def test_modules_that_lora_cannot_adapt_are_refused(intact_policy, modules, count):
    model = "actor_rollout_ref.model"
    overrides = [f"{POLICY}={intact_policy}", "env.env_name=number_line", f"{model}.lora_rank=4"]
    reported = find_start_problems(
        load_config("ppo_trainer", [*overrides, f"{model}.target_modules={modules}"])
    )
    assert len(reported) == count
    assert all(
        text.startswith(f"{model}.target_modules=") and "q_proj" in text for text in reported
    )
