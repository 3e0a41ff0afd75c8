"""The chat templates of ``trl``, each with a tokenizer that has the tokens of the template."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_model import make_tiny_tokenizer

# Control tokens in the text of a template: <|im_end|>, <turn|>, </s>, [INST].
CONTROL = re.compile(
    r"<[|｜][^<>\s'\"]{1,40}?[|｜]?>|<[^<>\s'\"/]{1,30}[|｜]>"  # noqa: RUF001  bars of DeepSeek
    r"|</?(?:start_of_turn|end_of_turn|s|turn|image)>|\[/?INST\]|\[gMASK\]|<sop>"
    r"|<end_of_utterance>"
)
# Tags that are tokens of the real tokenizers, but no control tokens.
TAGS = re.compile(r"</?(?:tool_call|tool_response|arg_key|arg_value)>")


@cache
def trl_templates() -> dict[str, str]:
    """Return the text of every chat template of ``trl`` by name."""
    trl = pytest.importorskip("trl")
    paths = sorted((Path(trl.__file__).parent).rglob("*.jinja"))
    return {path.stem: path.read_text() for path in paths}


def template_names() -> list[str]:
    """Return the names of the templates, for the parameters of a test."""
    try:
        import trl
    except ImportError:
        return []
    return sorted(path.stem for path in Path(trl.__file__).parent.rglob("*.jinja"))


@cache
def trl_tokenizer(name: str) -> Any:
    """Return a tiny tokenizer with the template ``name`` and its control tokens."""
    template = trl_templates()[name]
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "unk_token": "<unk>"})
    control = sorted({match[0] for match in CONTROL.finditer(template)})
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.add_tokens(sorted({match[0] for match in TAGS.finditer(template)}))
    tokenizer.chat_template = template
    return tokenizer
