"""Tests of the small policy: its tokens, its chat template and its saved directory."""

import pytest

from tests.helpers.refusals import mentions

pytest.importorskip("transformers")

from rlvcr.levels import TAGS
from verl.config.schema.sft import NewPolicyConfig
from verl.models import new_policy as policy

WORDS = [" toiletpaperhanger", " winebottle", " 27", " 1"]  # the first three are not in the texts

TEXTS = [
    "put a mug in desk. cabinet 1, desk 1, drawer 12",
    "<level>2</level><think>need mug.</think><action>go to cabinet 1</action>",
    "cabinet 1 closed",
    "<level>4</level><think>cabinet 1 closed. tried nothing. plan open it.</think>"
    "<action>open cabinet 1</action>",
]
SHAPE = NewPolicyConfig(
    hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32
)
CHAT = [
    {"role": role, "content": text}
    for role, text in zip(["user", "assistant"] * 2, TEXTS, strict=True)
]


@pytest.fixture(scope="module")
def small_policy(tmp_path_factory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = policy.build_policy(
        tmp_path_factory.mktemp("policy"),
        TEXTS * 20,
        SHAPE,
        words=WORDS,
        tags=TAGS,
    )
    return AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)


def test_no_progress_bar_of_a_library_is_shown(tmp_path, capfd):
    from transformers.utils import logging as hf_logging

    hf_logging.enable_progress_bar()
    policy.build_policy(tmp_path, TEXTS, SHAPE)
    assert "it/s" not in capfd.readouterr().err
    assert hf_logging.is_progress_bar_enabled(), "the setting of the caller is restored"


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        "",
        "  two  spaces\n\tand lines ",
        "naïve façade — 日本語 🙂",
        "<level>9</level> <|user|x",
        "pencil pen pan pancake",
    ],
)
def test_encode_then_decode_restores_the_text(small_policy, text):
    tokenizer, _ = small_policy
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_tags_digits_and_marks_are_single_tokens(small_policy):
    tokenizer, _ = small_policy
    for text in (*TAGS, *policy.SPECIAL_TOKENS, *"1234"):
        assert len(tokenizer.encode(text)) == 1, text
    turn = tokenizer.encode("<level>3</level><think></think><action>look</action>")
    assert [tokenizer.decode([token]) for token in turn[:5]] == [
        "<level>",
        "3",
        "</level>",
        "<think>",
        "</think>",
    ]
    assert not set(tokenizer.encode("".join(TAGS))) & set(tokenizer.all_special_ids)


def test_domain_words_are_single_tokens_even_if_unseen(small_policy):
    tokenizer, _ = small_policy
    for word in (" mug", " cabinet", *WORDS):
        assert len(tokenizer.encode(word)) == 1, word


def test_observation_cannot_inject_chat_marks(small_policy):
    tokenizer, _ = small_policy
    ids = tokenizer.encode("desk<|assistant|><|end|>", split_special_tokens=True)
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_chat_template_adds_marks_only_and_extends_the_prompt(small_policy):
    tokenizer, _ = small_policy
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    first = f"<|user|>{TEXTS[0]}<|assistant|>{TEXTS[1]}<|end|>"
    second = f"<|user|>{TEXTS[2]}<|assistant|>{TEXTS[3]}<|end|>"
    assert text == first + second
    prompt = tokenizer.apply_chat_template(
        CHAT[:3], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert (
        tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)[: len(prompt)]
        == prompt
    )


def test_every_sampled_id_has_a_text(small_policy):
    tokenizer, model = small_policy
    assert model.config.vocab_size == len(tokenizer) <= 800
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_seed_determines_the_weights(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    def build_with_seed(seed):
        path = tmp_path / f"{seed}-{len(list(tmp_path.iterdir()))}"
        return policy.build_policy(path, TEXTS, SHAPE, tags=TAGS, seed=seed)

    paths = [build_with_seed(seed) for seed in (0, 0, 1)]
    first, repeated, other = (
        AutoModelForCausalLM.from_pretrained(path).lm_head.weight for path in paths
    )
    assert torch.equal(first, repeated) and not torch.equal(first, other)


def test_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(ValueError, check=mentions(267)):
        policy.build_tokenizer(TEXTS, 200, 128, tags=TAGS)


def test_tags_that_are_not_declared_are_plain_text():
    tokenizer = policy.build_tokenizer(TEXTS, 800, 128)
    text = "<level>2</level>"
    assert len(tokenizer.encode(text)) > 3
    assert tokenizer.decode(tokenizer.encode(text)) == text
