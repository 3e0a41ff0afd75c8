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


# Code of a model that is stored next to its weights, in two files.
MODEL_CODE = {
    "configuration_custom.py": """
from transformers import Qwen3Config

class CustomConfig(Qwen3Config):
    model_type = "custom_for_export"
""",
    "modeling_custom.py": """
from transformers import Qwen3ForCausalLM

from .configuration_custom import CustomConfig

class CustomForCausalLM(Qwen3ForCausalLM):
    config_class = CustomConfig
""",
}
AUTO_MAP = {
    "AutoConfig": "configuration_custom.CustomConfig",
    "AutoModelForCausalLM": "modeling_custom.CustomForCausalLM",
}


def test_code_and_tokenizer_files_of_the_source_are_exported(policy, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(policy, source)
    for name, code in MODEL_CODE.items():
        (source / name).write_text(code)
    config = json.loads((source / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    config |= {"auto_map": AUTO_MAP, "model_type": "custom_for_export"}
    config["architectures"] = ["CustomForCausalLM"]
    (source / "config.json").write_text(json.dumps(config))
    templates = source / "additional_chat_templates"
    templates.mkdir()
    tokenizer_files = ["spiece.model", "qwen.tiktoken", "additional_chat_templates/tools.jinja"]
    # Files of models for images and text.
    tokenizer_files += ["processor_config.json", "video_preprocessor_config.json"]
    tokenizer_files += ["preprocessor_config.json", "chat_template.json"]
    for name in tokenizer_files:
        (source / name).write_text(name)
    (source / "pytorch_model.bin").write_bytes(b"weights of the source")
    export(source, target)
    for name in tokenizer_files:
        assert (target / name).read_text() == name
    assert not (target / "pytorch_model.bin").exists()
    shutil.rmtree(source)
    lm = load_causal_lm(target, trust_remote_code=True)
    assert type(lm).__name__ == "CustomForCausalLM"


def test_scripts_next_to_a_model_without_own_code_are_not_exported(policy, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(policy, source)
    (source / "train.py").write_text("")
    export(source, target)
    assert not list(target.glob("*.py"))
