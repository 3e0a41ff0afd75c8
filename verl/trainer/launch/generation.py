"""Construction of ``main_generation``, which samples answers to the prompts of a file.

rows ─▶ checks ─▶ chat template ─▶ engine in this process
    ─▶ each answer ─▶ NAME.partial.jsonl ─▶ all answers ─▶ NAME.jsonl, NAME.parquet
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from agent_system.tokens.bridge import ChatBridge, PlainBridge, is_chat_tokenizer
from agent_system.tokens.template_support import check_template_support
from verl.config.checks.batch_sizes import check_sampling_truncation, check_temperature
from verl.config.derive import find_greedy_override
from verl.config.problems import build_conflict, build_problem
from verl.config.schema.actor_rollout_ref import RolloutConfig, ValSamplingConfig
from verl.config.schema.tools import GenerationConfig
from verl.config.settings import ConfigError, value_at_path
from verl.config.settings.errors import get_problem_code
from verl.models.hub import model_directory
from verl.trainer.launch.preflight_machine import find_write_problem
from verl.trainer.launch.preflight_weights import load_checked_tokenizer, summarize_error
from verl.utils import jsonl
from verl.utils.chat_template import UnsupportedTemplateError
from verl.utils.files import (
    add_path_to_errors,
    rename_with_number,
    replace_atomically,
    require_new_file,
)
from verl.utils.message_rows import DataRow, Message, read_prompt_messages, read_table
from verl.utils.progress import Progress, record_heartbeat
from verl.utils.sampling import SamplingRequest, SamplingResult
from verl.utils.seeds import derive_seed
from verl.utils.watchdog import watch_run
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engine_registry import ENGINES, create_engine, import_engine_class

logger = logging.getLogger(__name__)
OUTPUT_KEY = "data.output_path"
OUTPUT_SUFFIXES = (".jsonl", ".parquet")
ALLOWED_OUTPUT = "a file that can be created and written"
Record = dict[str, Any]


def run_generation(cfg: GenerationConfig) -> Path:
    """Sample answers to the prompts of ``cfg.data.path``; return the path of the output file."""
    data = cfg.data
    if cfg.rollout.max_model_len is None:
        row_length = data.max_prompt_length + data.max_response_length
        cfg = cfg.with_values({"rollout.max_model_len": row_length})
    _check_sampling(cfg)
    output_path = choose_output_path(cfg)
    rows = list(read_table("data.path", [data.path]))
    messages = [read_prompt_messages(row, data.prompt_key, "data.prompt_key") for row in rows]
    answer_file = AnswerFile(output_path, rows, data.response_key)
    _require_engine(cfg.rollout.name)
    setting = f"model.path={cfg.model.path!r}"
    try:
        policy_directory = model_directory(cfg.model.path)
    except FileNotFoundError as error:
        raise ConfigError(f"{setting}: {error}; fix: set model.path=DIR", "missing_file") from error
    tokenizer = load_checked_tokenizer(setting, Path(policy_directory), cfg.model.trust_remote_code)
    token_bridge = make_token_bridge(cfg, tokenizer)
    requests = build_requests(cfg, encode_prompts(cfg, messages, token_bridge))
    text_by_request: dict[str, str] = {}

    def store_result(result: SamplingResult) -> None:
        text = token_bridge.decode(result.token_ids)
        text_by_request[result.request_id] = text
        row, _, sample = result.request_id.partition("/")
        answer_file.append_answer(int(row), int(sample), text)

    with answer_file.keep_partial_answers():
        with (
            _watch_for_stalls(cfg, answer_file.path),
            contextlib.closing(_open_engine(cfg, policy_directory)) as engine,
        ):
            sample_answers(engine, requests, store_result)
        answer_texts = [text_by_request[request.request_id] for request in requests]
        n = data.n_samples
        answer_file.write(
            [answer_texts[start : start + n] for start in range(0, len(answer_texts), n)]
        )
    sys.stdout.write(f"{answer_file.path}\n")
    return answer_file.path


def _check_sampling(cfg: GenerationConfig) -> None:
    """Raise ``ConfigError`` if several answers to a prompt would be equal (greedy sampling).

    Also raise it for a temperature at which engines do not sample, and for sampling keys that have
    no effect or exclude every token.
    """
    problems = [
        *check_temperature(cfg, "rollout"),
        *check_sampling_truncation(cfg, "rollout", is_trained_on=False),
    ]
    key = find_greedy_override(cfg.rollout)
    if cfg.data.n_samples > 1 and key:
        why = f"generation is greedy (rollout.{key}), so all answers to a prompt are equal"
        fix = "set data.n_samples=1, or rollout.do_sample=true rollout.temperature=1.0 "
        fix += "rollout.top_k=-1"
        allowed = "1 for greedy generation"
        problems.append(build_conflict(cfg, "data.n_samples", why, allowed, fix))
    n = cfg.rollout.n
    if n != 1:
        why = "the number of answers to a prompt is data.n_samples"
        fix = f"data.n_samples={n} rollout.n=1"
        problems.append(build_problem(cfg, "rollout.n", why, "1", fix, "no_effect"))
    for name in ValSamplingConfig.model_fields:
        key = f"rollout.val_kwargs.{name}"
        if value_at_path(cfg, key) != value_at_path(RolloutConfig(), f"val_kwargs.{name}"):
            effective_key = "data.n_samples" if name == "n" else f"rollout.{name}"
            why = f"it applies to validation, and answers are sampled with {effective_key}"
            fix = f"set {effective_key} instead"
            problems.append(build_problem(cfg, key, why, "its default", fix, "no_effect"))
    if problems:
        raise ConfigError(problems)


def _require_engine(name: str) -> None:
    try:
        import_engine_class(name)
    except (ImportError, AttributeError, ValueError) as error:
        why = str(error).removeprefix(f"actor_rollout_ref.rollout.name={name!r}: ")
        raise ConfigError(
            f"rollout.name={name!r}: {why}; allowed: {', '.join(ENGINES)}, or module:Class of a "
            "user-provided engine; fix: correct the name, or install the engine",
            get_problem_code(error, "invalid_syntax"),
        ) from error


def _open_engine(cfg: GenerationConfig, policy_directory: str) -> RolloutEngine:
    rollout_config = cfg.rollout
    engine_arguments = (
        rollout_config.name,
        rollout_config,
        policy_directory,
        rollout_config.seed,
        rollout_config.num_threads,
    )
    try:
        return create_engine(*engine_arguments, trust_remote_code=cfg.model.trust_remote_code)
    except Exception as error:  # from the engine, its settings or the files of the model
        setting = f"model.path={cfg.model.path!r}"
        if rollout_config.name not in ENGINES:
            setting = f"rollout.name={rollout_config.name!r}"
        raise ConfigError(
            f"{setting}: the engine {rollout_config.name!r} cannot load the model: "
            f"{summarize_error(error)}; allowed: a model and settings that the engine supports; "
            "fix: correct the model's files, or the keys of rollout",
            "failed_call",
        ) from error


@contextlib.contextmanager
def _watch_for_stalls(cfg: GenerationConfig, target: Path) -> Iterator[None]:
    log_directory = _make_log_directory(target)
    timeouts = (cfg.trainer.waiting_log_s, cfg.trainer.stall_timeout_s)
    try:
        with watch_run(log_directory, *timeouts) as enter_stage:
            enter_stage("generation")
            yield
    finally:
        with contextlib.suppress(OSError):  # keep the directory if it contains stack dumps
            log_directory.rmdir()


def choose_output_path(cfg: GenerationConfig) -> Path:
    """Return the path of the output file; raise ``ConfigError`` if it must not be written."""
    input_path = Path(os.path.expanduser(cfg.data.path))
    suffix = input_path.suffix if input_path.suffix in OUTPUT_SUFFIXES else ".jsonl"
    output_file = input_path.with_name(f"{input_path.stem}.generated{suffix}")
    if cfg.data.output_path:
        output_file = Path(os.path.expanduser(cfg.data.output_path))
    if output_file.suffix not in OUTPUT_SUFFIXES:
        raise ConfigError(
            f"data.output_path={str(output_file)!r}: unsupported file type; allowed: "
            f"{', '.join(OUTPUT_SUFFIXES)}; fix: set data.output_path=answers.jsonl",
            "out_of_range",
        )
    if input_path.resolve() in (output_file.resolve(), _make_partial_path(output_file).resolve()):
        raise ConfigError(
            f"data.output_path={str(output_file)!r}: this file or its partial file is that of "
            "data.path, which is never overwritten; allowed: another file; fix: remove the key",
            "file_exists",
        )
    require_new_file(output_file, "data.output_path", cfg.data.overwrite, "data.overwrite=true")
    return output_file


def encode_prompts(
    cfg: GenerationConfig, prompts: Sequence[Sequence[Message]], bridge: ChatBridge | PlainBridge
) -> list[list[int]]:
    """Return the token ids of every prompt; raise ``ConfigError`` if one is too long or invalid."""
    data = cfg.data
    prompt_ids: list[list[int]] = []
    for row, messages in enumerate(prompts):
        try:
            prompt_ids.append(bridge.encode_first_prompt(messages))
            if not prompt_ids[-1]:
                raise ValueError("the tokenizer returns no tokens")
        except ValueError as error:
            raise ConfigError(
                f"data.path={data.path!r}: row {row}: {summarize_error(error)}; allowed: messages "
                f"that the chat template of {cfg.model.path} supports; fix: remove the row, or use "
                "another policy",
                "unsupported_template",
            ) from error
    prompt_lengths = [len(ids) for ids in prompt_ids]
    max_prompt_length = data.max_prompt_length
    too_long_rows = [
        row for row, prompt_length in enumerate(prompt_lengths) if prompt_length > max_prompt_length
    ]
    if too_long_rows:
        first_row = too_long_rows[0]
        raise ConfigError(
            f"data.max_prompt_length={max_prompt_length}: row {first_row} has "
            f"{prompt_lengths[first_row]} tokens ({len(too_long_rows)} of {len(prompt_lengths)} "
            f"rows have more than {max_prompt_length}); allowed: {max(prompt_lengths)} or more; "
            f"fix: set data.max_prompt_length={max(prompt_lengths)}",
            "does_not_fit",
        )
    return prompt_ids


def make_token_bridge(cfg: GenerationConfig, tokenizer: Any) -> ChatBridge | PlainBridge:
    """Return the object that renders prompts, with a chat template if any, and decodes answers."""
    if not is_chat_tokenizer(tokenizer):
        return PlainBridge(tokenizer)
    template_arguments = cfg.data.apply_chat_template_kwargs
    try:
        check_template_support(tokenizer, template_arguments).check_history_support("window")
    except UnsupportedTemplateError as error:
        raise ConfigError(
            f"model.path={cfg.model.path!r}: {error}; allowed: a chat template with a generation "
            "prompt; fix: put another chat_template.jinja into its directory",
            "unsupported_template",
        ) from error
    return ChatBridge(tokenizer, template_arguments)


def build_requests(cfg: GenerationConfig, prompts: Sequence[list[int]]) -> list[SamplingRequest]:
    """Return ``n_samples`` requests per prompt.

    The seed of a request depends only on ``rollout.seed`` and the numbers of prompt and sample.
    """
    rollout_config = cfg.rollout
    return [
        SamplingRequest(
            f"{row}/{sample}",
            prompt,
            cfg.data.max_response_length,
            temperature=rollout_config.temperature if rollout_config.do_sample else 0.0,
            top_p=rollout_config.top_p,
            top_k=rollout_config.top_k,
            seed=derive_seed("generation", rollout_config.seed, row, sample),
        )
        for row, prompt in enumerate(prompts)
        for sample in range(cfg.data.n_samples)
    ]


def sample_answers(
    engine: RolloutEngine,
    requests: Sequence[SamplingRequest],
    on_result: Callable[[SamplingResult], None],
) -> None:
    """Sample ``requests`` and call ``on_result`` with each result as soon as it is complete."""
    for request in requests:
        try:
            engine.add(request)
        except ValueError as error:  # the request does not fit the model's context
            row = request.request_id.partition("/")[0]
            raise ConfigError(
                f"rollout.max_model_len: row {row} of data.path: {error}; allowed: a prompt and "
                "an answer within the context of the model; fix: shorten the prompt",
                "does_not_fit",
            ) from error
    num_complete = 0
    with Progress("generation", len(requests), "answers") as progress:
        while engine.has_work():
            for result in engine.step():
                on_result(result)
                num_complete += 1
            # One answer may take longer than the stall timeout.
            record_heartbeat("generation")
            progress.set_done(num_complete)


# ---- output file -----------------------------------------------------------------------------


class AnswerFile:
    """Output file with the prompt ``rows`` and their answers, and a partial file during sampling.

    If a Parquet table cannot represent the rows, the file is written as JSON lines, with a warning.
    Raises ``ConfigError`` if the file cannot be written, or if the rows already have ``column``.
    """

    def __init__(self, path: Path, rows: Sequence[DataRow], column: str) -> None:
        self.column = column
        for row in rows:
            if column in row.cells:
                fix = f"set data.response_key to a name not in {', '.join(map(str, row.cells))}"
                raise row.make_error(
                    column, "exists already", "a new column", fix, "conflicting_keys"
                )
        if not column:
            raise ConfigError(
                "data.response_key='': the name is empty; allowed: a column name; fix: remove the "
                "key to use its default",
                "invalid_syntax",
            )
        why = _find_output_problem(path) or _find_output_problem(_make_partial_path(path))
        why = why or find_write_problem(_make_log_directory(path))
        if why:
            raise ConfigError(
                f"{OUTPUT_KEY}={str(path)!r}: {why}; allowed: {ALLOWED_OUTPUT}; "
                f"fix: {OUTPUT_KEY}=FILE",
                "not_writable",
            )
        self.path = path
        self.records = [dict(row.cells) for row in rows]
        if path.suffix == ".parquet":
            self.path = _choose_table_path(path, self._add_answers([[""]] * len(rows)))
        if self.path.suffix == ".jsonl":
            self.records = [{name: row.read_cell(name) for name in row.cells} for row in rows]

    @property
    def partial_path(self) -> Path:
        """Path of the partial file, which contains the answers that are complete."""
        return _make_partial_path(self.path)

    @contextlib.contextmanager
    def keep_partial_answers(self) -> Iterator[None]:
        """Delete the partial file at the end of the ``with`` block; keep it after an error."""
        if self.partial_path.exists():
            logger.warning("%s is now %s", self.partial_path, rename_with_number(self.partial_path))
        try:
            yield
        except BaseException:
            if self.partial_path.exists():
                logger.warning("the answers so far are in %s", self.partial_path)
            raise
        self.partial_path.unlink(missing_ok=True)

    def append_answer(self, row: int, sample: int, text: str) -> None:
        """Append an answer to the partial file.

        ``text`` is the answer number ``sample`` to the prompt in row number ``row``.
        """
        record = {"row": row, "sample": sample, self.column: text}
        with (
            add_path_to_errors(self.partial_path),
            self.partial_path.open("a", encoding="utf-8") as file,
        ):
            file.write(jsonl.dumps(record) + "\n")

    def write(self, answers: Sequence[list[str]]) -> None:
        """Write the rows with their ``answers``. Raise ``ConfigError`` if that fails."""
        records = self._add_answers(answers)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.suffix == ".jsonl":
                jsonl.write(self.path, records)
            else:
                table = build_table(records)
                with replace_atomically(self.path) as partial_path:
                    pyarrow.parquet.write_table(table, partial_path)
        except OSError as error:
            why = f"cannot be written: {error}; the answers are in {self.partial_path}"
            allowed = "allowed: a file on a disk with free space; fix: free disk space, or set"
            message = f"{OUTPUT_KEY}={str(self.path)!r}: {why}; {allowed} {OUTPUT_KEY}=FILE"
            raise ConfigError(message, "not_writable") from error

    def _add_answers(self, answers: Sequence[list[str]]) -> list[Record]:
        record_answer_pairs = zip(self.records, answers, strict=True)
        return [record | {self.column: answer} for record, answer in record_answer_pairs]


def _make_partial_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.partial.jsonl")


def _make_log_directory(path: Path) -> Path:
    return path.with_name(f"{path.stem}.logs")


def _find_output_problem(path: Path) -> str:
    """Return the reason why no file can be written at ``path``; "" if one can be."""
    try:
        is_directory = path.is_dir()
        path.exists()  # raises for a name that is too long, unlike is_dir()
    except (OSError, ValueError) as error:
        return f"it cannot be a file: {getattr(error, 'strerror', None) or error}"
    return "it is a directory" if is_directory else find_write_problem(path.parent)


def _choose_table_path(path: Path, records: Sequence[Record]) -> Path:
    """Return ``path`` if a Parquet table can represent ``records``, else a path for JSON lines."""
    try:
        empty_table = build_table(records).schema.empty_table()
        pyarrow.parquet.write_table(empty_table, pyarrow.BufferOutputStream())
    # ValueError: text with an unpaired surrogate. OverflowError: integer of more than 64 bits.
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        # Use the first of NAME.jsonl, NAME.1.jsonl, NAME.2.jsonl, ... that does not exist.
        file_stems = chain([path.stem], (f"{path.stem}.{number}" for number in count(1)))
        paths = (path.with_name(f"{name}.jsonl") for name in file_stems)
        json_lines_path = next(candidate for candidate in paths if not candidate.exists())
        why = " ".join(str(error).split())
        logger.warning(
            "Parquet cannot represent the rows (%s): they are written to %s", why, json_lines_path
        )
        return json_lines_path
    return path


def build_table(records: Sequence[Record]) -> pyarrow.Table:
    """Return a PyArrow table of ``records``. Empty dicts, which Parquet lacks, become null."""
    column_names = dict.fromkeys(name for record in records for name in record)
    columns = (
        [_replace_empty_dicts(record.get(name)) for record in records] for name in column_names
    )
    return pyarrow.table(dict(zip(column_names, map(pyarrow.array, columns), strict=True)))


def _replace_empty_dicts(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _replace_empty_dicts(item) for key, item in value.items()} or None
    return [_replace_empty_dicts(item) for item in value] if isinstance(value, list) else value
