"""Token ids that end a turn. All code that samples or reads model output uses the same set."""

import contextlib
import json
from pathlib import Path
from typing import Any

from verl.utils.chat_template import ChatTemplate, TemplateUnsupported
from verl.utils.chat_tokens import ChatTokens


def find_end_ids(tokenizer: Any, model_path: str | Path | None = None) -> frozenset[int]:
    """Return the ids that end a turn when they are sampled.

    They are the end of turn of the chat template, the tokenizer's end of sequence, and those of the
    generation config in ``model_path``. The default of ``model_path`` is the directory that the
    tokenizer was loaded from.
    """
    path = getattr(tokenizer, "name_or_path", "") if model_path is None else model_path
    ids = set(read_config_end_ids(path)) if path else set()
    ids.update(_collect_ids(getattr(tokenizer, "eos_token_id", None)))
    with contextlib.suppress(TemplateUnsupported):
        end_of_turn_id = find_end_of_turn_id(tokenizer, ChatTemplate(tokenizer).render_turn_end())
        ids.update(_collect_ids(end_of_turn_id))
    return frozenset(ids)


def find_end_of_turn_id(tokenizer: Any, turn_end: str) -> int | None:
    """Return the control token that ends an assistant turn; None if plain text ends it.

    ``turn_end`` is the template's text after the content of the turn.
    """
    tokens = ChatTokens(tokenizer, turn_end)
    closing = tokens.find_leading_control_text(turn_end)
    control_ids = [token for token in tokens.encode(closing) if token in tokens.control_ids]
    return control_ids[0] if control_ids else None


def read_config_end_ids(model_path: str | Path) -> frozenset[int]:
    """Return ``eos_token_id`` (one or several) of the generation config in ``model_path``.

    If there is no generation config, the model's config is read. Without both, the set is empty.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            return frozenset(_collect_ids(config.get("eos_token_id")))
    return frozenset()


def _collect_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int)]
