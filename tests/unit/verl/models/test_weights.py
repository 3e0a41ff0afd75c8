"""Weights that are damaged or of another model are refused, by their files and when loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.models.loader import load_causal_lm, read_config
from verl.models.policy import ValueModel
from verl.models.weights import UnusableWeights, check_weights, load_weights

FILE = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def tensors(change):
    """Damage of the tensors in the file."""

    def damage(directory: Path) -> None:
        weights = load_file(directory / FILE)
        change(weights)
        save_file(weights, directory / FILE, metadata={"format": "pt"})

    return damage


def config(**values):
    """Damage of ``config.json``."""

    def damage(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


def rename_all(weights):
    for name in list(weights):
        weights[f"xx.{name}"] = weights.pop(name)


def drop_prefix(weights):
    for name in list(weights):
        weights[name.removeprefix("model.")] = weights.pop(name)


def put(name, make):
    return tensors(lambda weights: weights.update({name: make(weights)}))


def with_value(value):
    def make(weights):
        found = weights[QUERY].clone()
        found[-1, -1] = value
        return found

    return put(QUERY, make)


def embedding(weights):
    return weights["model.embed_tokens.weight"].clone()


def cut(directory):
    file = directory / FILE
    file.write_bytes(file.read_bytes()[:-100])


def pointer(directory):
    (directory / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")


def shard(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    (directory / FILE).unlink()
    model.save_pretrained(directory, max_shard_size="100KB")


def lose_shard(directory):
    shard(directory)
    (directory / "model-00002-of-00005.safetensors").unlink()


def cut_shard(directory):
    shard(directory)
    file = directory / "model-00002-of-00005.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def break_index(directory):
    shard(directory)
    (directory / f"{FILE}.index.json").write_text("{")


def save_as_bin(directory):
    torch.save(load_file(directory / FILE), directory / "pytorch_model.bin")
    (directory / FILE).unlink()


def cut_bin(directory):
    save_as_bin(directory)
    file = directory / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1000])


def nan_in_bin(directory):
    with_value(torch.nan)(directory)
    save_as_bin(directory)


DAMAGE = {
    "missing": (tensors(lambda w: w.pop(QUERY)), f"({QUERY})"),
    "renamed": (tensors(rename_all), "xx.model.embed_tokens.weight"),
    "unexpected": (put("v_head.weight", lambda _: torch.ones(3)), "(v_head.weight)"),
    "shape": (put(QUERY, lambda w: w[QUERY][:1].clone()), f"({QUERY} [1, 64]"),
    "transposed": (
        put("model.layers.0.mlp.up_proj.weight", lambda w: w[QUERY].new_ones(64, 192)),
        "[64, 192]",
    ),
    "nan": (with_value(torch.nan), f"({QUERY})"),
    "inf": (with_value(-torch.inf), f"({QUERY})"),
    "other head": (put("lm_head.weight", lambda w: embedding(w) + 1), "tie_word_embeddings"),
    "untied config": (config(tie_word_embeddings=False), "(lm_head.weight)"),
    "other kind": (
        config(model_type="llama", architectures=["LlamaForCausalLM"]),
        "LlamaForCausalLM",
    ),
    "more layers": (
        config(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "(model.layers.2",
    ),
    "fewer layers": (
        config(num_hidden_layers=1, layer_types=["full_attention"]),
        "(model.layers.1",
    ),
    "cut": (cut, FILE),
    "empty": (lambda d: (d / FILE).write_bytes(b""), FILE),
    "no weights": (lambda d: (d / FILE).write_text("<html>not found</html>"), FILE),
    "pointer": (pointer, "git-lfs"),
    "half": (lambda d: (d / FILE).rename(d / f"{FILE}.incomplete"), f"{FILE}.incomplete"),
    "nothing": (lambda d: (d / FILE).unlink(), FILE),
    "no index": (
        lambda d: (d / FILE).rename(d / "model-00001-of-00002.safetensors"),
        "model-",
    ),
    "lost shard": (lose_shard, "model.safetensors.index.json"),
    "cut shard": (cut_shard, "model-00002-of-00005.safetensors"),
    "broken index": (break_index, "model.safetensors.index.json"),
    "cut bin": (cut_bin, "transformers"),
    "nan in bin": (nan_in_bin, QUERY),
    "two models": (lambda d: shutil.copy(d / FILE, d / "old.safetensors"), "old.safetensors"),
    "adapters": (lambda d: (d / "adapter_config.json").write_text("{}"), "LoRA"),
}
SOUND = {
    "as saved": lambda _: None,
    "shards": shard,
    "bin": save_as_bin,
    "without prefix": tensors(drop_prefix),
    "tied head, saved as well": put("lm_head.weight", embedding),
    "a buffer that transformers computes": put(
        "model.layers.0.self_attn.rotary_emb.inv_freq", lambda _: torch.ones(16)
    ),
    "half precision": tensors(lambda w: w.update({n: t.bfloat16() for n, t in w.items()})),
    "weights of another program": lambda d: shutil.copy(d / FILE, d / "consolidated.safetensors"),
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("tied"))


@pytest.fixture
def policy(tied, tmp_path):
    return Path(shutil.copytree(tied, tmp_path / "policy"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_with_the_names(policy, damage):
    make, why = DAMAGE[damage]
    make(policy)
    with pytest.raises(UnusableWeights) as refused:
        check_weights(policy, read_config(policy), setting="model.path='x'")
    message = str(refused.value)
    assert message.startswith("model.path='x': ") and why in message
    assert "; allowed: " in message and "; fix: " in message
    # And where the files were changed after they were checked:
    with pytest.raises((UnusableWeights, FileNotFoundError, RuntimeError)):
        load_causal_lm(policy)


@pytest.mark.parametrize("kind", SOUND)
def test_sound_weights_are_taken(policy, tied, kind):
    SOUND[kind](policy)
    check_weights(policy, read_config(policy))
    found = dict(load_weights(policy, dtype=torch.float32).named_parameters())
    rounding = 0.01 if kind == "half precision" else 0
    for name, tensor in load_file(tied / FILE).items():
        torch.testing.assert_close(found[name].data, tensor, atol=rounding, rtol=rounding)


def test_weights_that_transformers_converts_are_taken(tmp_path):
    """Experts are one tensor each in the file, and one for all in the model."""
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    experts: dict[str, Any] = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    moe = Qwen3MoeConfig(vocab_size=64, **small, **heads, **experts)
    AutoModelForCausalLM.from_config(moe).save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    assert name in load_file(tmp_path / FILE)
    check_weights(tmp_path, read_config(tmp_path))
    tensors(lambda weights: weights.pop(name))(tmp_path)
    with pytest.raises(UnusableWeights):
        check_weights(tmp_path, read_config(tmp_path))


def test_a_critic_needs_the_backbone_alone(tmp_path):
    directory = make_tiny_policy(tmp_path, tie=False)

    def replace_head(weights):
        weights["score.weight"] = weights.pop("lm_head.weight")[:1].clone()

    tensors(replace_head)(directory)
    described = read_config(directory)
    check_weights(directory, described, use="value")
    assert ValueModel(load_causal_lm(directory, use="value")).head_weight.abs().max() == 0
    with pytest.raises(UnusableWeights, check=mentions("lm_head.weight", "score.weight")):
        check_weights(directory, described)
    tensors(lambda weights: weights.pop(QUERY))(directory)
    with pytest.raises(UnusableWeights, match=QUERY):
        check_weights(directory, described, use="value")


def test_a_part_of_a_large_model_is_read(policy, monkeypatch):
    monkeypatch.setattr("verl.models.weights.SCANNED_BYTES", 1)
    put("model.embed_tokens.weight", lambda w: torch.full_like(embedding(w), torch.nan))(policy)
    with pytest.raises(UnusableWeights, check=mentions("embed_tokens")):
        check_weights(policy, read_config(policy))
