"""Checks before a supervised run starts: of its files, its policy and the machine."""

from collections.abc import Iterator
from pathlib import Path

from agent_system.tokens.bridge import ChatBridge
from verl.config.checks.models import ALLOWED_MODELS
from verl.config.problems import build_problem
from verl.config.schema import SFTConfig
from verl.config.settings import ConfigError, Problem, value_at_path
from verl.models.hub import resolve_directory_without_weights
from verl.models.loader import read_config
from verl.models.weights import first_line
from verl.trainer.launch.preflight_machine import find_machine_problems, find_write_problem
from verl.trainer.launch.preflight_resume import find_resume_problems
from verl.trainer.launch.preflight_weights import find_override_config_problems, load_tokenizer
from verl.trainer.launch.sft import (
    check_expert,
    check_save_path,
    encode_records,
    find_initial_policy_problems,
    make_rows,
)
from verl.trainer.sft.rows import TOKENS_COLUMN, Record, read_records

PATH_KEY = "model.path"
TOKENIZER_KEY = "model.tokenizer_path"
SAVE_PATH_KEY = "model.save_path"
MAX_CHECKED_EPISODES = 64  # number of episodes of files that are tokenised before the start


def find_sft_problems(cfg: SFTConfig) -> list[Problem]:
    """Return the problems of all checks on a config that passed ``verl.config.validate``."""
    problems = [
        *find_machine_problems(cfg),
        *_find_directory_problems(cfg),
        *_find_head_width_problems(cfg),
    ]
    records: list[Record] = []
    try:
        if cfg.data.train_files:
            records = read_records(cfg.data, "train")
            read_records(cfg.data, "val")
        else:
            check_expert(cfg)
    except ConfigError as error:
        problems += error.problems
    problems += _find_model_problems(cfg, records)
    if not problems:
        problems += find_resume_problems(cfg)
    return problems


def _find_directory_problems(cfg: SFTConfig) -> Iterator[Problem]:
    keys = [SAVE_PATH_KEY] if cfg.data.train_files else [SAVE_PATH_KEY, "data.data_dir"]
    for key in keys:
        path = value_at_path(cfg, key)
        # Also check the parent: the directory is written there under another name and then renamed.
        why = "the path is empty"
        if path:
            why = find_write_problem(Path(path).parent) or find_write_problem(Path(path))
        if why:
            allowed = "a directory that can be created and written"
            yield build_problem(cfg, key, why, allowed, f"set {key}=DIR", "not_writable")
        elif key == SAVE_PATH_KEY:
            try:
                check_save_path(cfg)
            except ConfigError as error:
                yield from error.problems


def _find_head_width_problems(cfg: SFTConfig) -> Iterator[Problem]:
    """Yield a problem if the head width of a new policy is odd, which RoPE does not support."""
    head_width = cfg.model.new.head_width
    if not cfg.model.path and head_width % 2:
        key = "model.new.head_dim"
        why = f"the width of a head is {head_width}, and rotary embeddings need pairs of numbers"
        yield build_problem(cfg, key, why, "an even width", f"set {key}=32", "out_of_range")


def _find_model_problems(cfg: SFTConfig, records: list[Record]) -> Iterator[Problem]:
    if cfg.model.path:
        try:
            directory = Path(resolve_directory_without_weights(cfg.model.path))
            config = read_config(directory, cfg.model.trust_remote_code)
        except (OSError, ValueError) as error:
            fix = f"set {PATH_KEY}=DIR"
            yield build_problem(
                cfg, PATH_KEY, first_line(error), ALLOWED_MODELS, fix, "unreadable_file"
            )
            return
        override_config = cfg.model.override_config
        problems = list(find_override_config_problems("model", override_config, config, directory))
        # A policy on the hub is checked after its download.
        if not problems and Path(cfg.model.path).is_dir():
            problems += find_initial_policy_problems(cfg, Path(cfg.model.path))
        yield from problems
        if problems:
            return
    elif any(TOKENS_COLUMN in record for record in records):
        why = "rows of token ids need a policy with the tokenizer of these ids"
        fix = f"set {PATH_KEY}=DIR"
        yield build_problem(cfg, PATH_KEY, why, ALLOWED_MODELS, fix, "missing_key")
        return
    path = cfg.model.tokenizer_path or cfg.model.path
    if path:  # otherwise the tokenizer is created with the policy
        yield from _find_tokenizer_problems(cfg, path, records)


def _find_tokenizer_problems(cfg: SFTConfig, path: str, records: list[Record]) -> Iterator[Problem]:
    key = TOKENIZER_KEY if cfg.model.tokenizer_path else PATH_KEY
    try:
        directory = resolve_directory_without_weights(path)
        tokenizer = load_tokenizer(directory, cfg.model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        why = f"cannot load its tokenizer: {first_line(error)}"
        fix = "put the tokenizer's files next to the weights"
        yield build_problem(cfg, key, why, "a tokenizer", fix, "no_model")
        return
    try:
        if not all(TOKENS_COLUMN in record for record in records) or not records:
            ChatBridge(tokenizer, cfg.data.apply_chat_template_kwargs)
    except ValueError as error:
        fix = "use an instruct model, or put a chat_template.jinja into its directory"
        allowed = "a chat template that renders every message"
        yield build_problem(cfg, key, str(error), allowed, fix, "unsupported_template")
        return
    try:
        if len(records) > MAX_CHECKED_EPISODES:
            list(encode_records(cfg, records[:MAX_CHECKED_EPISODES], tokenizer))
        else:
            make_rows(cfg, records, tokenizer)
    except ConfigError as error:
        yield from error.problems
