"""The composition root of a generation: prompts of a file, an engine in this process, answers
beside the prompts.

    rows ─▶ chat template ─▶ engine ─▶ texts ─▶ the rows with a further column
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.plain import PlainBridge
from agent_system.tokens.probe import probe_template
from agent_system.tokens.template import TemplateUnsupported
from agent_system.tokens.tokenizer import is_chat_tokenizer
from verl.config.checks.sampling import greedy_key
from verl.config.schema.tools import GenerationConfig
from verl.config.settings import ConfigError
from verl.models.hub import model_directory
from verl.trainer.launch.answers import SUFFIXES, AnswerFile
from verl.trainer.launch.preflight_weights import checked_tokenizer
from verl.utils.files import require_new_file
from verl.utils.message_rows import Message, prompt_messages, read_table
from verl.utils.progress import Progress, move
from verl.utils.sampling import SamplingRequest, SamplingResult
from verl.utils.seeds import derive_seed
from verl.utils.watchdog import watched
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engine_registry import ENGINES, create_engine, engine_class


def run_generation(cfg: GenerationConfig) -> Path:
    """Answer the prompts of ``cfg.data.path`` and return the file that holds prompts and answers.

    Raises ``ConfigError`` for a file, row or column that is not there or cannot be used, a prompt
    that is too long, an output that cannot be written, and a policy that is nowhere.
    """
    data = cfg.data
    rollout = cfg.rollout
    _require_different_samples(cfg)
    target = output_path(cfg)
    rows = list(read_table("data.path", [data.path]))
    messages = [prompt_messages(row, data.prompt_key, "data.prompt_key") for row in rows]
    answers = AnswerFile(target, rows, data.response_key)
    _require_engine(rollout.name)
    try:
        policy = model_directory(cfg.model.path)
    except FileNotFoundError as error:
        raise ConfigError(f"model.path={cfg.model.path!r}: {error}; fix: model.path=DIR") from error
    trust = cfg.model.trust_remote_code
    tokenizer = checked_tokenizer(f"model.path={cfg.model.path!r}", Path(policy), trust)
    bridge = bridge_of(cfg, tokenizer)
    prompts = encode_prompts(cfg, messages, bridge)
    if rollout.max_model_len is None:
        rollout.max_model_len = data.max_prompt_length + data.max_response_length
    requests = requests_of(cfg, prompts)
    texts: dict[str, str] = {}

    def keep(result: SamplingResult) -> None:
        text = bridge.decode(result.token_ids)
        texts[result.request_id] = text
        row, _, sample = result.request_id.partition("/")
        answers.keep(int(row), int(sample), text)

    with answers.keeping():
        with (
            _watched(cfg, answers.path),
            contextlib.closing(_open_engine(cfg, policy)) as engine,
        ):
            answer(engine, requests, keep)
        listed = [texts[request.request_id] for request in requests]
        n = data.n_samples
        answers.write([listed[start : start + n] for start in range(0, len(listed), n)])
    sys.stdout.write(f"{answers.path}\n")
    return answers.path


def _require_different_samples(cfg: GenerationConfig) -> None:
    key = greedy_key(cfg.rollout)
    if cfg.data.n_samples > 1 and key:
        raise ConfigError(
            f"data.n_samples={cfg.data.n_samples}: generation is greedy (rollout.{key}), so all "
            "answers to a prompt are the same; allowed: 1 where nothing is sampled; fix: "
            "data.n_samples=1, or rollout.do_sample=true rollout.temperature=1.0 rollout.top_k=-1"
        )


def _require_engine(name: str) -> None:
    try:
        engine_class(name)
    except (ImportError, AttributeError, ValueError) as error:
        allowed = f"{', '.join(ENGINES)}, or module:Class of your own"
        why = str(error).removeprefix(f"actor_rollout_ref.rollout.name={name!r}: ")
        raise ConfigError(
            f"rollout.name={name!r}: {why}; allowed: {allowed}; fix: mend the name, or install it"
        ) from error


def _open_engine(cfg: GenerationConfig, policy: str) -> RolloutEngine:
    rollout = cfg.rollout
    where = (rollout, policy, rollout.seed, rollout.num_threads)
    try:
        return create_engine(rollout.name, *where, trust_remote_code=cfg.model.trust_remote_code)
    except Exception as error:  # an engine, its settings and the files of a model
        blamed = f"model.path={cfg.model.path!r}"
        if rollout.name not in ENGINES:
            blamed = f"rollout.name={rollout.name!r}"
        raise ConfigError(
            f"{blamed}: the engine {rollout.name!r} does not open the model: "
            f"{_brief(error)}; allowed: a model that it can load, and settings that it takes; "
            "fix: mend the model's files, or the keys of rollout"
        ) from error


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


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
    source = Path(cfg.data.path).expanduser()
    named = cfg.data.output_path
    suffix = source.suffix if source.suffix in SUFFIXES else ".jsonl"
    target = (
        Path(named).expanduser() if named else source.with_name(f"{source.stem}.generated{suffix}")
    )
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


def encode_prompts(
    cfg: GenerationConfig,
    prompts: Sequence[Sequence[Message]],
    bridge: ChatBridge | PlainBridge,
) -> list[list[int]]:
    """The tokens of every prompt, in the chat template where there is one."""
    data = cfg.data
    limit = data.max_prompt_length
    encoded = []
    for messages in prompts:
        try:
            ids = bridge.first_prompt(messages)
            if not ids:
                raise ValueError("the tokenizer makes no token of it")
        except ValueError as error:
            place = f"data.path={data.path!r}: row {len(encoded)}"
            raise ConfigError(
                f"{place}: {_brief(error)}; allowed: messages that the chat template of "
                f"{cfg.model.path} shows; fix: leave out the row, or choose another policy"
            ) from error
        encoded.append(ids)
    longer = [number for number, ids in enumerate(encoded) if len(ids) > limit]
    if longer:
        longest = max(map(len, encoded))
        raise ConfigError(
            f"data.max_prompt_length={limit}: row {longer[0]} has {len(encoded[longer[0]])} tokens "
            f"({len(longer)} of {len(encoded)} rows have more than {limit}); allowed: {longest} or "
            f"more; fix: data.max_prompt_length={longest}"
        )
    return encoded


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


def answer(
    engine: RolloutEngine,
    requests: Sequence[SamplingRequest],
    on_result: Callable[[SamplingResult], None],
) -> None:
    """Sample ``requests``; each result is given to ``on_result`` as soon as it is there."""
    for request in requests:
        try:
            engine.add(request)
        except ValueError as error:  # it does not fit the model's context
            row = request.request_id.partition("/")[0]
            raise ConfigError(
                f"rollout.max_model_len: row {row} of data.path: {error}; allowed: a prompt and "
                "an answer within the context of the model; fix: a shorter prompt"
            ) from error
    done = 0
    with Progress("generation", len(requests), "answers") as progress:
        while engine.has_work():
            for result in engine.step():
                on_result(result)
                done += 1
            move("generation")  # an answer may take longer than a run may stand still
            progress.to(done)
