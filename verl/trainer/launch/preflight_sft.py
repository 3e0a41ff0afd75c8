"""What is refused of a supervised run before anything is made: with its files, its policy and the
machine at hand.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_system.tokens.bridge import ChatBridge
from verl.config.problems import problem
from verl.config.schema import SFTConfig
from verl.config.settings import ConfigError, lookup
from verl.models.hub import description_directory
from verl.models.loader import read_config
from verl.trainer.launch.preflight_machine import machine_problems, unwritable
from verl.trainer.launch.preflight_weights import tie_problems
from verl.trainer.launch.sft import check_expert, encode_records, make_rows, start_policy_problems
from verl.trainer.sft.rows import TOKENS, Record, read_records

PATH = "model.path"
TOKENIZER = "model.tokenizer_path"
SAVE_PATH = "model.save_path"
MODEL = "a directory in Hugging Face format, or a hub name"
LOOKED_AT = 64  # episodes of files that are tokenised before the start


def sft_problems(cfg: SFTConfig) -> list[str]:
    """Messages of all checks of a config that has no other problem."""
    found = [*machine_problems(cfg), *_place_problems(cfg), *_size_problems(cfg)]
    records: list[Record] = []
    try:
        if cfg.data.train_files:
            records = read_records(cfg.data, "train")
            read_records(cfg.data, "val")
        else:
            check_expert(cfg)
    except ConfigError as error:
        found += error.problems
    found += _model_problems(cfg, records)
    return found


def _place_problems(cfg: SFTConfig) -> Iterator[str]:
    """The policy, and the expert's episodes where they are made, can be written."""
    keys = [SAVE_PATH] if cfg.data.train_files else [SAVE_PATH, "data.data_dir"]
    for key in keys:
        place = lookup(cfg, key)
        # Both: a policy replaces its directory, which is renamed in the one above.
        why = unwritable(Path(place).parent) or unwritable(Path(place)) if place else "no name"
        if why:
            allowed = "a directory that can be made and written"
            yield problem(cfg, key, why, allowed, f"{key}=DIR")


def _size_problems(cfg: SFTConfig) -> Iterator[str]:
    """The heads of a new policy can be rotated."""
    new = cfg.model.new
    width = new.head_dim or new.hidden_size // new.num_attention_heads
    if not cfg.model.path and width % 2:
        key = "model.new.head_dim"
        why = f"the {width} numbers of a head do not come in pairs, which are rotated"
        yield problem(cfg, key, why, "an even width", f"{key}=32")


def _model_problems(cfg: SFTConfig, records: list[Record]) -> Iterator[str]:
    """The policy and its tokenizer are there, and can write what is imitated."""
    if cfg.model.path:
        try:
            config = read_config(
                Path(description_directory(cfg.model.path)), cfg.model.trust_remote_code
            )
            unknown = [key for key in cfg.model.override_config if not hasattr(config, key)]
        except (OSError, ValueError) as error:
            yield problem(cfg, PATH, _first_line(error), MODEL, f"{PATH}=DIR")
            return
        for key in unknown:
            why = f"{type(config).__name__} has no value {key!r}"
            yield problem(cfg, "model.override_config", why, "values of it", "leave it out")
        yield from tie_problems("model.override_config", cfg.model.override_config, config)
        broken = list(start_policy_problems(cfg))
        if broken:
            yield from broken
            return
    elif any(TOKENS in record for record in records):
        why = "rows of token ids are of a tokenizer that is there"
        yield problem(cfg, PATH, why, MODEL, f"{PATH}=DIR")
        return
    key = TOKENIZER if cfg.model.tokenizer_path else PATH
    if not (cfg.model.tokenizer_path or cfg.model.path):
        return  # the tokenizer is made with the policy
    try:
        tokenizer = _tokenizer(cfg)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        why = f"its tokenizer does not load: {_first_line(error)}"
        yield problem(cfg, key, why, "a tokenizer", "put its files beside the weights")
        return
    try:
        if not all(TOKENS in record for record in records) or not records:
            ChatBridge(tokenizer, cfg.data.apply_chat_template_kwargs)
    except ValueError as error:
        fix = "an instruct model, or a chat_template.jinja in its directory"
        yield problem(cfg, key, str(error), "a chat template that shows every message", fix)
        return
    try:
        if len(records) > LOOKED_AT:
            list(encode_records(cfg, records[:LOOKED_AT], tokenizer))
        else:
            make_rows(cfg, records, tokenizer)
    except ConfigError as error:
        yield from error.problems


def _tokenizer(cfg: SFTConfig) -> Any:
    # By call: its import takes seconds.
    from transformers import AutoTokenizer

    place = description_directory(str(cfg.model.tokenizer_path or cfg.model.path))
    return AutoTokenizer.from_pretrained(place, trust_remote_code=cfg.model.trust_remote_code)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
