"""Models for images and text are trained on text alone; their other weights do not change."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BartConfig,
    Blip2Config,
    Florence2Config,
    Llama4Config,
    MllamaConfig,
    Pix2StructConfig,
    Qwen3Config,
    SiglipConfig,
)

from tests.helpers.engine_cases import run_requests
from tests.helpers.model_families import IMAGE_TEXT, build_image_text_family
from tests.helpers.naive_scorer import NaiveScorer
from tests.helpers.policy_rows import actor_of, add_branches, random_rows
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.models.architecture import UnsupportedArchitectureError
from verl.models.auto_class import choose_auto_class
from verl.models.loader import load_causal_lm, predict_packing_support, read_config
from verl.models.weights import check_weights
from verl.utils.sampling import SamplingRequest
from verl.workers.rollout.hf import HFEngine

TOLERANCE = 1e-5
TEXT_ONLY = ("qwen3.5",)  # families of which transformers loads the text model alone
VISION_NAMES = ("vision", "visual", "projector")
BUFFER = "layer_scalar"  # of Gemma 4, not trained


def is_vision_weight(name: str) -> bool:
    return any(part in name for part in VISION_NAMES)


def load_exported(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def build_checkpoint(tmp_path_factory):
    """Return a function that gives the directory and the model of a family."""
    made = {}

    def build_once(name):
        if name not in made:
            model = build_image_text_family(IMAGE_TEXT[name]())
            directory = tmp_path_factory.mktemp("image-text")
            model.save_pretrained(directory)
            made[name] = directory, model
        return made[name]

    return build_once


@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_text_is_trained_and_other_weights_are_kept(build_checkpoint, tmp_path, name):
    directory, model = build_checkpoint(name)
    check_weights(directory, read_config(directory))
    worker = actor_of(directory)
    data = add_branches(random_rows(3))
    scores = worker.compute_log_prob(data)
    expected = NaiveScorer(model)(data)
    torch.testing.assert_close(
        scores.batch["old_log_probs"], expected.batch["old_log_probs"], atol=TOLERANCE, rtol=0
    )
    for row, expected_row in zip(
        scores.non_tensor_batch["branch_scores"],
        expected.non_tensor_batch["branch_scores"],
        strict=True,
    ):
        assert [list(s) for s in row] == [
            pytest.approx(list(s), abs=TOLERANCE) for s in expected_row
        ]
    worker.update_actor(data)
    worker.export_hf(str(tmp_path))
    before, after = load_exported(directory), load_exported(tmp_path)
    vision_names = set(filter(is_vision_weight, before))
    assert after.keys() == (before.keys() - vision_names if name in TEXT_ONLY else before.keys())
    changed = {key for key in after if not torch.equal(before[key], after[key])}
    assert vision_names
    assert changed == {key for key in after if not is_vision_weight(key) and BUFFER not in key}
    # An engine that was started from ``directory`` knows these names.
    assert after.keys() == {key for key, _ in worker.export_weights()}


@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_exported_model_is_loaded_by_the_class_that_its_config_names(
    build_checkpoint, tmp_path, name
):
    directory, model = build_checkpoint(name)
    actor_of(directory).export_hf(str(tmp_path))
    architectures = json.loads((tmp_path / "config.json").read_text())["architectures"]
    exported = load_causal_lm(tmp_path)
    assert architectures == [type(exported).__name__]
    assert architectures == (
        ["Qwen3_5ForCausalLM"] if name in TEXT_ONLY else [type(model).__name__]
    )
    ids = torch.arange(3, 9)[None]
    plain = choose_auto_class(exported.config).from_pretrained(tmp_path)
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_engine_samples_with_the_log_probs_of_the_model(build_checkpoint, name):
    directory, model = build_checkpoint(name)
    config = read_config(directory)
    loaded = choose_auto_class(config).from_pretrained(directory)
    engine = HFEngine.wrap_model(loaded, make_tiny_tokenizer(), [1], max_num_seqs=2)
    requests = [SamplingRequest(f"r{i}", list(range(5, 9 + i)), max_tokens=6) for i in range(3)]
    results = run_requests(engine, requests)
    scorer = NaiveScorer(model)
    for request in requests:
        result, start = results[request.request_id], len(request.prompt_ids)
        ids = request.prompt_ids + result.token_ids
        expected, _ = scorer.measure(ids, start, len(ids))
        torch.testing.assert_close(
            torch.tensor(result.logprobs), expected, atol=TOLERANCE, rtol=0, check_dtype=False
        )


@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_prediction_without_weights_is_the_choice_at_load(build_checkpoint, name):
    forward_kind = load_causal_lm(build_checkpoint(name)[0]).forward_kind
    reason = getattr(forward_kind, "not_packed_reason", "")
    limit = getattr(forward_kind, "max_row_tokens", None)
    assert predict_packing_support(IMAGE_TEXT[name]()) == (reason, limit)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Llama4Config(architectures=["Llama4ForConditionalGeneration"]), "Llama4ForCausalLM"),
        (MllamaConfig(architectures=["MllamaForConditionalGeneration"]), "MllamaForCausalLM"),
        (Blip2Config(), "pixel_values"),
        (Florence2Config(), "an encoder"),
        (Pix2StructConfig(is_encoder_decoder=False), "token ids"),
        (SiglipConfig(), "causal language model"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_refusal_names_why_a_model_cannot_be_trained_on_text(config, reason):
    with pytest.raises(UnsupportedArchitectureError, check=mentions(config.model_type, reason)):
        choose_auto_class(config)


def test_class_for_images_and_text_is_used_only_without_another_one():
    assert choose_auto_class(IMAGE_TEXT["mistral3"]()) is AutoModelForImageTextToText
    text = Llama4Config(architectures=["Llama4ForCausalLM"])
    for config in (IMAGE_TEXT["gemma3"](), IMAGE_TEXT["qwen3.5"](), Qwen3Config(), text):
        assert choose_auto_class(config) is AutoModelForCausalLM
    assert choose_auto_class(BartConfig()) is AutoModelForCausalLM
