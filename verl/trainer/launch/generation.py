"""Construction of ``main_generation``, which samples answers to the prompts of a file.

rows ─▶ chat template ─▶ engine in this process ─▶ texts ─▶ rows with an additional column
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.plain_bridge import PlainBridge
from agent_system.tokens.probe import probe_template
from agent_system.tokens.template import TemplateUnsupported
from agent_system.tokens.tokenizer import is_chat_tokenizer
from verl.config.checks.batch_sizes import greedy_key
from verl.config.schema.tools import GenerationConfig
from verl.config.settings import ConfigError
from verl.models.hub import model_directory
from verl.trainer.launch.answers import SUFFIXES, AnswerFile
from verl.trainer.launch.preflight_weights import load_checked_tokenizer
from verl.utils.files import require_new_file
from verl.utils.message_rows import Message, read_prompt_messages, read_table
from verl.utils.progress import Progress, record_heartbeat
from verl.utils.sampling import SamplingRequest, SamplingResult
from verl.utils.seeds import derive_seed
from verl.utils.watchdog import watch_run
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engine_registry import ENGINES, create_engine, import_engine_class


def run_generation(cfg: GenerationConfig) -> Path:
    """Sample answers to the prompts of ``cfg.data.path``, and return the path of the output file.

    Raises:
        ConfigError: a file, row or column is missing or invalid, a prompt is too long, the output
            cannot be written, or there is no policy.
    """
    data = cfg.data
    if cfg.rollout.max_model_len is None:
        row_length = data.max_prompt_length + data.max_response_length
        cfg = cfg.with_values({"rollout.max_model_len": row_length})
    rollout = cfg.rollout
    _require_different_samples(cfg)
    output_path = choose_output_path(cfg)
    rows = list(read_table("data.path", [data.path]))
    messages = [read_prompt_messages(row, data.prompt_key, "data.prompt_key") for row in rows]
    answers = AnswerFile(output_path, rows, data.response_key)
    _require_engine(rollout.name)
    try:
        policy = model_directory(cfg.model.path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"model.path={cfg.model.path!r}: {error}; fix: set model.path=DIR"
        ) from error
    trust = cfg.model.trust_remote_code
    tokenizer = load_checked_tokenizer(f"model.path={cfg.model.path!r}", Path(policy), trust)
    bridge = make_token_bridge(cfg, tokenizer)
    prompts = encode_prompts(cfg, messages, bridge)
    requests = build_requests(cfg, prompts)
    texts: dict[str, str] = {}

    def store_result(result: SamplingResult) -> None:
        text = bridge.decode(result.token_ids)
        texts[result.request_id] = text
        row, _, sample = result.request_id.partition("/")
        answers.append_answer(int(row), int(sample), text)

    with answers.keep_partial_answers():
        with (
            _watch_generation(cfg, answers.path),
            contextlib.closing(_open_engine(cfg, policy)) as engine,
        ):
            sample_answers(engine, requests, store_result)
        answer_texts = [texts[request.request_id] for request in requests]
        n = data.n_samples
        answers.write([answer_texts[start : start + n] for start in range(0, len(answer_texts), n)])
    sys.stdout.write(f"{answers.path}\n")
    return answers.path


def _require_different_samples(cfg: GenerationConfig) -> None:
    key = greedy_key(cfg.rollout)
    if cfg.data.n_samples > 1 and key:
        raise ConfigError(
            f"data.n_samples={cfg.data.n_samples}: generation is greedy (rollout.{key}), so all "
            "answers to a prompt are equal; allowed: 1 for greedy generation; fix: set "
            "data.n_samples=1, or rollout.do_sample=true rollout.temperature=1.0 rollout.top_k=-1"
        )


def _require_engine(name: str) -> None:
    try:
        import_engine_class(name)
    except (ImportError, AttributeError, ValueError) as error:
        allowed = f"{', '.join(ENGINES)}, or module:Class of a user-provided engine"
        why = str(error).removeprefix(f"actor_rollout_ref.rollout.name={name!r}: ")
        raise ConfigError(
            f"rollout.name={name!r}: {why}; allowed: {allowed}; fix: correct the name, or install "
            "the engine"
        ) from error


def _open_engine(cfg: GenerationConfig, policy: str) -> RolloutEngine:
    rollout = cfg.rollout
    engine_args = (rollout, policy, rollout.seed, rollout.num_threads)
    try:
        return create_engine(
            rollout.name, *engine_args, trust_remote_code=cfg.model.trust_remote_code
        )
    except Exception as error:  # from the engine, its settings or the files of the model
        setting = f"model.path={cfg.model.path!r}"
        if rollout.name not in ENGINES:
            setting = f"rollout.name={rollout.name!r}"
        raise ConfigError(
            f"{setting}: the engine {rollout.name!r} cannot load the model: "
            f"{_summarize_error(error)}; allowed: a model and settings that the engine supports; "
            "fix: correct the model's files, or the keys of rollout"
        ) from error


def _summarize_error(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextlib.contextmanager
def _watch_generation(cfg: GenerationConfig, target: Path) -> Iterator[None]:
    logs = target.with_name(f"{target.stem}.logs")
    try:
        with watch_run(logs, cfg.trainer.waiting_log_s, cfg.trainer.stall_timeout_s) as enter:
            enter("generation")
            yield
    finally:
        with contextlib.suppress(OSError):  # keep the directory if it contains stack dumps
            logs.rmdir()


def choose_output_path(cfg: GenerationConfig) -> Path:
    """Return the path of the output file.

    Raises:
        ConfigError: the suffix is not supported, the path is that of the prompts, or the file
            exists and ``data.overwrite`` is false.
    """
    source = Path(cfg.data.path).expanduser()
    output = cfg.data.output_path
    suffix = source.suffix if source.suffix in SUFFIXES else ".jsonl"
    output_file = (
        Path(output).expanduser()
        if output
        else source.with_name(f"{source.stem}.generated{suffix}")
    )
    if output_file.suffix not in SUFFIXES:
        raise ConfigError(
            f"data.output_path={str(output_file)!r}: unsupported file type; allowed: "
            f"{', '.join(SUFFIXES)}; fix: set data.output_path=answers.jsonl"
        )
    if output_file.resolve() == source.resolve():
        raise ConfigError(
            f"data.output_path={str(output_file)!r}: the file is that of data.path, which is never "
            "overwritten; allowed: another file; fix: remove the key"
        )
    require_new_file(output_file, "data.output_path", cfg.data.overwrite, "data.overwrite=true")
    return output_file


def encode_prompts(
    cfg: GenerationConfig,
    prompts: Sequence[Sequence[Message]],
    bridge: ChatBridge | PlainBridge,
) -> list[list[int]]:
    """Return the token ids of every prompt, rendered with the chat template if there is one.

    Raises:
        ConfigError: a prompt cannot be rendered, or is longer than ``data.max_prompt_length``.
    """
    data = cfg.data
    limit = data.max_prompt_length
    encoded = []
    for messages in prompts:
        try:
            ids = bridge.first_prompt(messages)
            if not ids:
                raise ValueError("the tokenizer returns no tokens")
        except ValueError as error:
            row = f"data.path={data.path!r}: row {len(encoded)}"
            raise ConfigError(
                f"{row}: {_summarize_error(error)}; allowed: messages that the chat template of "
                f"{cfg.model.path} supports; fix: remove the row, or use another policy"
            ) from error
        encoded.append(ids)
    longer = [row_index for row_index, ids in enumerate(encoded) if len(ids) > limit]
    if longer:
        max_len = max(map(len, encoded))
        raise ConfigError(
            f"data.max_prompt_length={limit}: row {longer[0]} has {len(encoded[longer[0]])} tokens "
            f"({len(longer)} of {len(encoded)} rows have more than {limit}); allowed: {max_len} or "
            f"more; fix: set data.max_prompt_length={max_len}"
        )
    return encoded


def make_token_bridge(cfg: GenerationConfig, tokenizer: Any) -> ChatBridge | PlainBridge:
    """Return the object that renders prompts and decodes answers, for chat or plain tokenizers.

    Raises:
        ConfigError: the chat template has no generation prompt.
    """
    if not is_chat_tokenizer(tokenizer):
        return PlainBridge(tokenizer)
    arguments = cfg.data.apply_chat_template_kwargs
    try:
        probe_template(tokenizer, arguments).require_history("window")
    except TemplateUnsupported as error:
        raise ConfigError(
            f"model.path={cfg.model.path!r}: {error}; allowed: a chat template with a generation "
            "prompt; fix: put another chat_template.jinja into its directory"
        ) from error
    return ChatBridge(tokenizer, arguments)


def build_requests(cfg: GenerationConfig, prompts: Sequence[list[int]]) -> list[SamplingRequest]:
    """Return ``n_samples`` requests per prompt, prompt by prompt.

    The seed of a request depends only on ``rollout.seed`` and its prompt and sample numbers.
    """
    rollout = cfg.rollout
    return [
        SamplingRequest(
            f"{row}/{sample}",
            prompt,
            cfg.data.max_response_length,
            temperature=rollout.temperature if rollout.do_sample else 0.0,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=derive_seed("generation", rollout.seed, row, sample),
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
                "an answer within the context of the model; fix: shorten the prompt"
            ) from error
    num_done = 0
    with Progress("generation", len(requests), "answers") as progress:
        while engine.has_work():
            for result in engine.step():
                on_result(result)
                num_done += 1
            record_heartbeat(
                "generation"
            )  # report progress: one answer may take longer than the stall timeout
            progress.set_done(num_done)
