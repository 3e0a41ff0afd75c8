"""Tests that damaged weights and weights of another model are refused, in the check and on
loading.
"""

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
from verl.models.weights import UnusableWeightsError, check_weights, load_weights

FILE = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def damage_tensors(change):
    """Return a function that changes the tensors in the file with ``change``."""

    def damage(directory: Path) -> None:
        weights = load_file(directory / FILE)
        change(weights)
        save_file(weights, directory / FILE, metadata={"format": "pt"})

    return damage


def damage_config(**values):
    """Return a function that changes ``config.json``."""

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


def replace_tensor(name, make):
    return damage_tensors(lambda weights: weights.update({name: make(weights)}))


def set_last_value(value):
    def make(weights):
        query = weights[QUERY].clone()
        query[-1, -1] = value
        return query

    return replace_tensor(QUERY, make)


def copy_embedding(weights):
    return weights[EMBEDDING].clone()


def cut_file(directory):
    file = directory / FILE
    file.write_bytes(file.read_bytes()[:-100])


def write_lfs_pointer(directory):
    (directory / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")


def save_shards(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    (directory / FILE).unlink()
    model.save_pretrained(directory, max_shard_size="100KB")


def lose_shard(directory):
    save_shards(directory)
    (directory / "model-00002-of-00005.safetensors").unlink()


def cut_shard(directory):
    save_shards(directory)
    file = directory / "model-00002-of-00005.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def break_index(directory):
    save_shards(directory)
    (directory / f"{FILE}.index.json").write_text("{")


def change_index(change):
    """Return a function that splits the weights into shards and changes their index."""

    def damage(directory):
        save_shards(directory)
        index = directory / f"{FILE}.index.json"
        content = json.loads(index.read_text())
        change(content["weight_map"])
        index.write_text(json.dumps(content))

    return damage


def add_to_second_shard(directory):
    save_shards(directory)
    shard = directory / "model-00002-of-00005.safetensors"
    embedding = load_file(directory / "model-00001-of-00005.safetensors")[EMBEDDING]
    save_file(load_file(shard) | {EMBEDDING: embedding + 1}, shard, metadata={"format": "pt"})


def save_as_bin(directory):
    torch.save(load_file(directory / FILE), directory / "pytorch_model.bin")
    (directory / FILE).unlink()


def cut_bin(directory):
    save_as_bin(directory)
    file = directory / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1000])


def nan_in_bin(directory):
    set_last_value(torch.nan)(directory)
    save_as_bin(directory)


DAMAGE = {
    "missing": (damage_tensors(lambda w: w.pop(QUERY)), f"({QUERY})"),
    "renamed": (damage_tensors(rename_all), "xx.model.embed_tokens.weight"),
    "unexpected": (replace_tensor("v_head.weight", lambda _: torch.ones(3)), "(v_head.weight)"),
    "shape": (replace_tensor(QUERY, lambda w: w[QUERY][:1].clone()), f"({QUERY} [1, 64]"),
    "transposed": (
        replace_tensor("model.layers.0.mlp.up_proj.weight", lambda w: w[QUERY].new_ones(64, 192)),
        "[64, 192]",
    ),
    "nan": (set_last_value(torch.nan), f"({QUERY})"),
    "inf": (set_last_value(-torch.inf), f"({QUERY})"),
    "other head": (
        replace_tensor("lm_head.weight", lambda w: copy_embedding(w) + 1),
        "tie_word_embeddings",
    ),
    "untied config": (damage_config(tie_word_embeddings=False), "(lm_head.weight)"),
    "other kind": (
        damage_config(model_type="llama", architectures=["LlamaForCausalLM"]),
        "LlamaForCausalLM",
    ),
    "more layers": (
        damage_config(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "(model.layers.2",
    ),
    "fewer layers": (
        damage_config(num_hidden_layers=1, layer_types=["full_attention"]),
        "(model.layers.1",
    ),
    "cut": (cut_file, FILE),
    "empty": (lambda d: (d / FILE).write_bytes(b""), FILE),
    "no weights": (lambda d: (d / FILE).write_text("<html>not found</html>"), FILE),
    "pointer": (write_lfs_pointer, "git-lfs"),
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
    "tensor in another shard": (
        change_index(lambda names: names.update({EMBEDDING: names[NORM]})),
        f"({EMBEDDING})",
    ),
    "tensor in no shard": (
        change_index(lambda names: names.update({"odd.weight": names[NORM]})),
        "(odd.weight)",
    ),
    "tensor not in the index": (change_index(lambda names: names.pop(NORM)), f"({NORM})"),
    "tensor in two shards": (add_to_second_shard, f"({EMBEDDING})"),
    "integers": (replace_tensor(QUERY, lambda w: w[QUERY].to(torch.int8)), f"({QUERY})"),
    "booleans": (replace_tensor(QUERY, lambda w: w[QUERY] > 0), f"({QUERY})"),
    "architecture of another engine": (
        damage_config(architectures=["LlamaForCausalLM"]),
        "LlamaForCausalLM",
    ),
    "architecture of a classifier": (
        damage_config(architectures=["Qwen3ForSequenceClassification"]),
        "Qwen3ForSequenceClassification",
    ),
    "adapters": (lambda d: (d / "adapter_config.json").write_text("{}"), "LoRA"),
}
REFUSED_CONFIGS = (
    {"vocab_size": "400"},
    {"num_hidden_layers": -1},
    {"head_dim": 7},
    {"rms_norm_eps": "x"},
    {"dtype": "float99"},
    {"layer_types": ["x"]},
    {"tie_word_embeddings": None},
    {"quantization_config": 5},
)
USABLE = {
    "as saved": lambda _: None,
    "shards": save_shards,
    "bin": save_as_bin,
    "without prefix": damage_tensors(drop_prefix),
    "tied head, saved as well": replace_tensor("lm_head.weight", copy_embedding),
    "a buffer that transformers computes": replace_tensor(
        "model.layers.0.self_attn.rotary_emb.inv_freq", lambda _: torch.ones(16)
    ),
    "half precision": damage_tensors(lambda w: w.update({n: t.bfloat16() for n, t in w.items()})),
    "weights of another program": lambda d: shutil.copy(d / FILE, d / "consolidated.safetensors"),
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("tied"))


@pytest.fixture
def policy(tied, tmp_path):
    return Path(shutil.copytree(tied, tmp_path / "policy"))


@pytest.mark.parametrize("values", REFUSED_CONFIGS, ids=str)
def test_config_with_invalid_values_is_refused_by_its_file(policy, values):
    damage_config(**values)(policy)
    with pytest.raises(ValueError, check=mentions("config.json: ")):
        read_config(policy)


def test_config_of_an_impossible_model_is_refused(policy):
    damage_config(num_attention_heads=0)(policy)
    with pytest.raises(UnusableWeightsError, check=mentions("model.path='x'")):
        check_weights(policy, read_config(policy), setting="model.path='x'")


@pytest.mark.parametrize("text", ["null", "[" * 100_000], ids=["null", "deep"])
def test_config_that_is_no_object_is_refused(policy, text):
    (policy / "config.json").write_text(text)
    with pytest.raises(ValueError, check=mentions("config.json: ")):
        read_config(policy)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_are_refused_by_name(policy, damage):
    damage_files, message_part = DAMAGE[damage]
    damage_files(policy)
    with pytest.raises(UnusableWeightsError) as refused:
        check_weights(policy, read_config(policy), setting="model.path='x'")
    message = str(refused.value)
    assert message.startswith("model.path='x': ") and message_part in message
    assert "; allowed: " in message and "; fix: " in message
    # Loading also refuses files that changed after the check.
    with pytest.raises((UnusableWeightsError, FileNotFoundError, RuntimeError)):
        load_causal_lm(policy)


@pytest.mark.parametrize("kind", USABLE)
def test_usable_weights_are_loaded(policy, tied, kind):
    USABLE[kind](policy)
    check_weights(policy, read_config(policy))
    model = load_weights(policy, config=read_config(policy), dtype=torch.float32)
    weights = dict(model.named_parameters())
    rounding = 0.01 if kind == "half precision" else 0
    for name, tensor in load_file(tied / FILE).items():
        torch.testing.assert_close(weights[name].data, tensor, atol=rounding, rtol=rounding)


def test_weights_that_transformers_converts_are_accepted(tmp_path):
    """In the file each expert has its own tensor; the model has one tensor for all."""
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
    damage_tensors(lambda weights: weights.pop(name))(tmp_path)
    with pytest.raises(UnusableWeightsError):
        check_weights(tmp_path, read_config(tmp_path))


def test_critic_needs_only_the_backbone(tmp_path):
    directory = make_tiny_policy(tmp_path, tie=False)

    def replace_head(weights):
        weights["score.weight"] = weights.pop("lm_head.weight")[:1].clone()

    damage_tensors(replace_head)(directory)
    config = read_config(directory)
    check_weights(directory, config, purpose="value")
    assert ValueModel(load_causal_lm(directory, purpose="value")).head_weight.abs().max() == 0
    with pytest.raises(UnusableWeightsError, check=mentions("lm_head.weight", "score.weight")):
        check_weights(directory, config)
    damage_tensors(lambda weights: weights.pop(QUERY))(directory)
    with pytest.raises(UnusableWeightsError, check=mentions(QUERY)):
        check_weights(directory, config, purpose="value")


def test_only_a_part_of_a_large_model_is_scanned(policy, monkeypatch):
    monkeypatch.setattr("verl.models.weights.SCANNED_BYTES", 1)
    replace_tensor(
        "model.embed_tokens.weight", lambda w: torch.full_like(copy_embedding(w), torch.nan)
    )(policy)
    with pytest.raises(UnusableWeightsError, check=mentions("embed_tokens")):
        check_weights(policy, read_config(policy))
