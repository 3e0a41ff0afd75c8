"""The composition root of a generation: prompts of a file, an engine in this process, answers
beside the prompts.

    rows ─▶ chat template ─▶ engine ─▶ texts ─▶ the rows with a further column
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.plain import PlainBridge
from agent_system.tokens.probe import probe_template
from agent_system.tokens.template import TemplateUnsupported
from agent_system.tokens.tokenizer import is_chat_tokenizer
from verl.models.hub import model_directory
from verl.trainer.config.schema.tools import GenerationConfig
from verl.trainer.launch.preflight_weights import checked_tokenizer
from verl.utils import jsonl
from verl.utils.files import require_new_file
from verl.utils.progress import Progress, move
from verl.utils.sampling import SamplingRequest, SamplingResult
from verl.utils.seeds import derive_seed
from verl.utils.settings import ConfigError
from verl.utils.tables import read_rows
from verl.utils.watchdog import watched
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engine_registry import create_engine

SUFFIXES = (".jsonl", ".parquet")
Record = dict[str, Any]


def run_generation(cfg: GenerationConfig) -> Path:
    """Answer the prompts of ``cfg.data.path`` and return the file that holds prompts and answers.

    Raises ``ConfigError`` for a file or column that is not there, a prompt that is too long, and a
    policy that is nowhere.
    """
    data = cfg.data
    target = output_path(cfg)
    records = _records(Path(data.path), data.prompt_key)
    try:
        policy = model_directory(cfg.model.path)
    except FileNotFoundError as error:
        raise ConfigError(f"model.path={cfg.model.path!r}: {error}; fix: model.path=DIR") from error
    trust = cfg.model.trust_remote_code
    tokenizer = checked_tokenizer(f"model.path={cfg.model.path!r}", Path(policy), trust)
    prompts = encode_prompts(cfg, records, tokenizer)
    rollout = cfg.rollout
    if rollout.max_model_len is None:
        rollout.max_model_len = data.max_prompt_length + data.max_response_length
    where = (rollout, policy, rollout.seed, rollout.num_threads)
    with (
        _watched(cfg, target),
        contextlib.closing(create_engine(rollout.name, *where, trust_remote_code=trust)) as engine,
    ):
        results = answer(engine, requests_of(cfg, prompts))
    texts = _texts(results, bridge_of(cfg, tokenizer), data.n_samples)
    write_records(
        target,
        [record | {data.response_key: said} for record, said in zip(records, texts, strict=True)],
    )
    sys.stdout.write(f"{target}\n")
    return target


@contextlib.contextmanager
def _watched(cfg: GenerationConfig, target: Path) -> Iterator[None]:
    logs = target.with_name(f"{target.stem}.logs")
    try:
        with watched(logs, cfg.trainer.waiting_log_s, cfg.trainer.stall_timeout_s) as enter:
            enter("generation")
            yield
    finally:
        with contextlib.suppress(OSError):  # stacks are kept
            logs.rmdir()


def output_path(cfg: GenerationConfig) -> Path:
    """The file that is written; raises ``ConfigError`` for one of another kind, or for the prompts'
    own.
    """
    source = Path(cfg.data.path)
    named = cfg.data.output_path
    target = Path(named) if named else source.with_name(f"{source.stem}.generated{source.suffix}")
    if target.suffix not in SUFFIXES:
        raise ConfigError(
            f"data.output_path={str(target)!r}: another kind of file; allowed: "
            f"{', '.join(SUFFIXES)}; fix: data.output_path=answers.jsonl"
        )
    if target.resolve() == source.resolve():
        raise ConfigError(
            f"data.output_path={str(target)!r}: is data.path, which is not written over; "
            "fix: leave it out"
        )
    require_new_file(target, "data.output_path", cfg.data.overwrite, "data.overwrite=true")
    return target


def _records(path: Path, prompt_key: str) -> list[Record]:
    try:
        records = list(read_rows(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.path={str(path)!r}: {error}; fix: data.path=FILE.jsonl") from error
    if not records:
        raise ConfigError(f"data.path={str(path)!r}: holds no row; fix: a file with prompts")
    for number, record in enumerate(records):
        if prompt_key not in record:
            raise ConfigError(
                f"data.prompt_key={prompt_key!r}: row {number} of {path} has no such column; "
                f"it has {', '.join(record)}; fix: data.prompt_key=NAME"
            )
    return records


def encode_prompts(
    cfg: GenerationConfig, records: Sequence[Mapping[str, Any]], tokenizer: Any
) -> list[list[int]]:
    """The tokens of every prompt, in the chat template where there is one."""
    data = cfg.data
    bridge = bridge_of(cfg, tokenizer)
    prompts = []
    for number, record in enumerate(records):
        prompt = record[data.prompt_key]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = bridge.first_prompt(messages)
        if len(ids) > data.max_prompt_length:
            raise ConfigError(
                f"data.max_prompt_length={data.max_prompt_length}: row {number} has {len(ids)} "
                f"tokens; fix: data.max_prompt_length={len(ids)}"
            )
        prompts.append(ids)
    return prompts


def bridge_of(cfg: GenerationConfig, tokenizer: Any) -> ChatBridge | PlainBridge:
    """The bridge that renders prompts and reads answers: the chat template's where there is one.

    Raises ``ConfigError`` for a template whose prompts ask for no answer.
    """
    if not is_chat_tokenizer(tokenizer):
        return PlainBridge(tokenizer)
    arguments = cfg.data.apply_chat_template_kwargs
    try:
        probe_template(tokenizer, arguments).require("window")
    except TemplateUnsupported as error:
        raise ConfigError(
            f"model.path={cfg.model.path!r}: {error}; allowed: a chat template that asks for an "
            "answer; fix: another chat_template.jinja in its directory"
        ) from error
    return ChatBridge(tokenizer, arguments)


def requests_of(cfg: GenerationConfig, prompts: Sequence[list[int]]) -> list[SamplingRequest]:
    """``n_samples`` requests per prompt, prompt by prompt; what each draws depends on its place and
    ``rollout.seed`` alone.
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


def answer(engine: RolloutEngine, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
    """The results of ``requests``, in their order."""
    for request in requests:
        engine.add(request)
    results: dict[str, SamplingResult] = {}
    with Progress("generation", len(requests), "answers") as progress:
        while engine.has_work():
            results |= {result.request_id: result for result in engine.step()}
            move("generation")  # an answer may take longer than a run may stand still
            progress.to(len(results))
    return [results[request.request_id] for request in requests]


def _texts(
    results: Sequence[SamplingResult], bridge: ChatBridge | PlainBridge, n: int
) -> list[list[str]]:
    texts = [bridge.decode(result.token_ids) for result in results]
    return [texts[start : start + n] for start in range(0, len(texts), n)]


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write ``path``, a jsonl or parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        jsonl.write(path, records)
        return
    import pyarrow
    import pyarrow.parquet as parquet  # an optional format: imported where it is written

    parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
