"""Tests that converted weights equal those in the files that transformers reads and writes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.helpers.model_families import ROW_WISE, SCALED, build_family, sizes
from verl.models.checkpoint_format import (
    convert_to_checkpoint,
    describe_transforms,
    plan_conversions,
    set_transforms,
)

FAMILIES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: hf.MixtralConfig(**sizes(), num_local_experts=2),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**sizes()),
    "phimoe": lambda: hf.PhimoeConfig(**sizes()),
} | {
    name: (ROW_WISE | SCALED)[name]
    for name in ("deepseek-v3", "deepseek-v4", "kimi-linear", "nemotron-3", "qwen4-exp", "qwen3")
}


def save_and_load(name: str, directory) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model that was loaded from files, and the weights in the files."""
    build_family(FAMILIES[name]()).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    return hf.AutoModelForCausalLM.from_pretrained(directory), weights


def convert_from_checkpoint(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    results: dict[str, torch.Tensor] = {}
    for conversion in plan_conversions(model, weights.keys(), to_checkpoint=False):
        results |= conversion.convert(model, weights)
    return results


def require_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("name", FAMILIES)
def test_conversion_gives_the_weights_in_the_files_and_back(name, tmp_path):
    model, file_weights = save_and_load(name, tmp_path)
    parameters = dict(model.state_dict())
    converted = convert_to_checkpoint(model, parameters)
    require_equal(converted, file_weights)
    assert (converted.keys() == parameters.keys()) == (name == "qwen3")
    require_equal(convert_from_checkpoint(model, file_weights), parameters)


def test_experts_are_numbered_in_their_order(tmp_path):
    """With 12 experts an alphabetical order would differ: 0, 1, 10, 11, 2."""
    config = hf.MixtralConfig(**sizes(), num_local_experts=12)
    build_family(config).save_pretrained(tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    down = torch.arange(12.0)[:, None, None].expand(12, 32, 64)
    weights = {"model.layers.0.mlp.experts.down_proj": down}
    converted = convert_to_checkpoint(model, weights)
    assert [
        converted[f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight"][0, 0].item()
        for i in range(12)
    ] == list(range(12))
    require_equal(convert_from_checkpoint(model, converted), weights)


def test_files_with_the_names_of_the_model_keep_them(tmp_path):
    """An engine was started with these files, so it knows only their names."""
    model, _ = save_and_load("mixtral", tmp_path)
    weights = dict(model.state_dict())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    require_equal(convert_to_checkpoint(loaded, loaded.state_dict()), weights)
    # A rank without files gets the transforms of the rank that loaded the model.
    other = build_family(FAMILIES["mixtral"]())
    assert convert_to_checkpoint(other, weights).keys() != weights.keys()
    set_transforms(other, describe_transforms(loaded))
    require_equal(convert_to_checkpoint(other, weights), weights)
