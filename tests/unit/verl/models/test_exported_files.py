"""Tests that exported directories are complete and can be loaded."""

import json
import shutil
from typing import Any

import pytest
from transformers import GenerationConfig

from tests.helpers.tiny_model import make_tiny_policy
from verl.models.export import save_hf
from verl.models.loader import load_causal_lm


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


def export(source, target) -> None:
    lm = load_causal_lm(source, trust_remote_code=True)
    save_hf(lm, dict(lm.named_parameters()), target, source)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("values", [{"temperature": 0.9, "top_p": 0.6}, {"pad_token_id": -1}])
def test_values_that_transformers_loads_and_does_not_save_are_exported(
    policy, tmp_path, file, values: dict[str, Any]
):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(policy, source)
    (source / "generation_config.json").unlink(missing_ok=True)
    old_values = json.loads((source / file).read_text()) if file == "config.json" else {}
    (source / file).write_text(json.dumps(old_values | values))
    export(source, target)
    exported = GenerationConfig.from_pretrained(target)
    assert {name: getattr(exported, name) for name in values} == values
    load_causal_lm(target)
