"""The composition root of a supervised run: it joins episodes, tokens and a policy, and hands them
to the ranks that train.

    episodes ─▶ messages ─▶ policy and tokenizer (new or given) ─▶ token rows ─▶ ranks ─▶ HF

Messages become tokens exactly as in a rollout, so what is learnt here is what is sampled there: an
episode is one row with ``append`` history, and a row for each step with ``window`` history.
"""

import logging
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from agent_system.environments.env_registry import env_settings, get_package
from agent_system.environments.experts.demonstrations import (
    NoExpert,
    expert_of,
    write_demonstrations,
)
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.probe import TemplateProbe, Verdict, probe_template
from agent_system.tokens.template import TemplateUnsupported
from rlvcr.levels import TAGS
from verl.config.schema import SFTConfig
from verl.config.settings import ConfigError
from verl.models.hub import model_directory
from verl.models.new_policy import build_policy
from verl.record.run_dir import RunDirectory
from verl.trainer.launch.preflight_weights import policy_problems
from verl.trainer.launch.sft_ranks import SFTJob, train_on_ranks
from verl.trainer.sft.rows import (
    AGENT_WEIGHT,
    PLACE,
    TOKENS,
    Record,
    SFTRow,
    read_records,
    token_row,
)
from verl.utils.files import require_replaceable
from verl.utils.logging import setup_logging
from verl.utils.message_rows import Message
from verl.utils.seeds import derive_seed, seed_everything
from verl.utils.tables import read_rows
from verl.utils.threads import available_cpus
from verl.utils.watchdog import watched

logger = logging.getLogger(__name__)


def run_sft(cfg: SFTConfig) -> Path:
    """Make the policy that ``cfg`` describes and return its directory."""
    started = time.perf_counter()
    schedule = cfg.trainer
    refuse_save_path(cfg)
    torch.set_num_threads(schedule.num_threads or available_cpus())
    seed_everything(schedule.seed)
    with (
        RunDirectory(schedule.default_local_dir).open(cfg, {"trainer": schedule.seed}) as run,
        run.logging_interrupts(),
        watched(run.logs, schedule.waiting_log_s, schedule.stall_timeout_s) as enter,
    ):
        setup_logging(run.logs / "sft.log")
        enter("episodes")
        train, held_out = load_records(cfg)
        enter("tokens")
        with tempfile.TemporaryDirectory(prefix="policy-") as scratch:
            source = starting_policy(cfg, train, Path(scratch))
            place = cfg.model.tokenizer_path or source
            trust = cfg.model.trust_remote_code
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust)
            job = SFTJob(
                cfg=cfg,
                run_dir=run.path,
                checkpoints=run.checkpoints,
                log_file=run.logs / "sft.log",
                source=source,
                tokenizer=str(place),
                rows=make_rows(cfg, train, tokenizer),
                val_rows=make_rows(cfg, held_out, tokenizer),
            )
            enter("imitation")
            save_path = train_on_ranks(job, schedule.n_gpus_per_node)
    logger.info("policy: %s (%.0f s in all)", save_path, time.perf_counter() - started)
    return save_path


def refuse_save_path(cfg: SFTConfig) -> None:
    """Raise ``ConfigError`` where ``model.save_path`` holds what no such run wrote."""
    named = (cfg.model.path, cfg.model.tokenizer_path, cfg.data.data_dir)
    keep = [Path(place) for place in named if place and Path(place).exists()]
    keep.append(Path(cfg.trainer.default_local_dir))
    require_replaceable(Path(cfg.model.save_path), "model.save_path", cfg.model.overwrite, keep)


# ---------------------------------------------------------------------- episodes


def load_records(cfg: SFTConfig) -> tuple[list[Record], list[Record]]:
    """Records to train on and held-out ones: from the files given, else from the environment's
    expert.
    """
    data = cfg.data
    if data.train_files:
        return read_records(data, "train"), read_records(data, "val")
    check_expert(cfg)
    path = write_demonstrations(
        cfg.env.env_name,
        env_settings(cfg.env),
        data.data_dir,
        num_episodes=data.episodes + data.val_episodes,
        seed=cfg.env.seed,
        num_workers=data.num_workers,
        slack=data.noise,
        levels=data.levels,
        needed_level_share=data.needed_level_share,
        window=cfg.env.history_length if data.history == "window" else None,
    )
    train, held_out = hold_out(list(read_rows(path)), data.val_episodes)
    if not train:
        raise ConfigError(
            f"data.val_episodes={data.val_episodes}: no episode is left to train on; allowed: "
            "fewer than there are, of other tasks; fix: a larger data.episodes"
        )
    return train, held_out


def check_expert(cfg: SFTConfig) -> None:
    """Raise ``ConfigError`` unless an expert plays the environment, has thoughts for
    ``data.levels`` and knows the needed ones where ``data.needed_level_share`` asks for them.
    """
    name = cfg.env.env_name
    levels = cfg.data.levels
    share = cfg.data.needed_level_share
    try:
        expert = expert_of(name)
    except NoExpert as error:
        fix = "set data.train_files to episodes of your own"
        raise ConfigError(f"env.env_name={name!r}: {error}; fix: {fix}") from error
    settings = env_settings(cfg.env)
    if not set(levels) <= set(expert.levels):
        allowed = ", ".join(map(str, expert.levels))
        raise ConfigError(
            f"data.levels={levels!r}: the expert of {name!r} has no thoughts for all of them; "
            f"allowed: any of {allowed}; fix: data.levels=[{allowed}]"
        )
    if share and not expert.tells_needed_level(settings):
        raise ConfigError(
            f"data.needed_level_share={share}: the expert of {name!r} does not tell which level a "
            "step needs; allowed: 0; fix: data.needed_level_share=0"
        )


def hold_out(records: list[Record], count: int) -> tuple[list[Record], list[Record]]:
    """Split off the last ``count`` records; what is left shares no task with them."""
    if not count:
        return records, []
    held_out = records[-count:]
    tasks = {record["task_id"] for record in held_out}
    return [record for record in records[:-count] if record["task_id"] not in tasks], held_out


def make_rows(cfg: SFTConfig, records: Sequence[Record], tokenizer) -> list[SFTRow]:
    """Rows of token records as they are, and of message records as a rollout would write them.

    Raises ``ConfigError`` for a record that cannot be one, and where none of them fits.
    """
    rows = [row for row in encode_records(cfg, records, tokenizer) if row]
    if records and not rows:
        raise ConfigError(
            f"data.max_length={cfg.data.max_length}: none of {len(records)} episodes has a turn "
            "that fits; allowed: room for a prompt and an answer; fix: data.max_length=TOKENS"
        )
    if len(rows) < len(records):
        logger.warning(
            "%d episodes are left out: not even their first turn fits data.max_length",
            len(records) - len(rows),
        )
    return rows


def encode_records(cfg: SFTConfig, records: Iterable[Record], tokenizer) -> Iterator[SFTRow | None]:
    """The row of each record, None where it does not fit. Raises ``ConfigError`` for a record that
    cannot be one.
    """
    bridge = None
    probe = None
    for record in records:
        try:
            # Made on first use: token records come without a chat template.
            if TOKENS not in record:
                probe = probe or probe_template(tokenizer, cfg.data.apply_chat_template_kwargs)
                _check_probe(probe, record[cfg.data.messages_key])
                bridge = bridge or ChatBridge(tokenizer, cfg.data.apply_chat_template_kwargs)
            yield _row(cfg, record, bridge, len(tokenizer))
        except TemplateUnsupported as error:
            raise ConfigError(
                f"model.path={cfg.model.path!r}: {error}; allowed: a chat template that writes the "
                "episodes of data.train_files; fix: another chat_template.jinja in its directory, "
                "or episodes of one turn (data.history=window)"
            ) from error
        except ValueError as error:
            place = record.get(PLACE, "an episode of the expert")
            raise ConfigError(
                f"{place}: {error}; allowed: what the tokenizer and its chat template can write; "
                "fix: leave out the row, or choose another policy"
            ) from error


def _check_probe(probe: TemplateProbe, messages: Sequence[Message]) -> None:
    """Raise ``TemplateUnsupported`` where the template writes no prompts, or the turns of
    ``messages`` are no growing text.
    """
    probe.require("window")
    turns = sum(message["role"] == "assistant" for message in messages)
    if turns > 1 and probe.verdict is not Verdict.APPEND:
        raise TemplateUnsupported(f"episodes of several turns cannot be written: {probe.reason}")


def _row(
    cfg: SFTConfig, record: Record, bridge: ChatBridge | None, vocabulary: int
) -> SFTRow | None:
    """The row of ``record``; None where it does not fit."""
    if bridge is None or TOKENS in record:
        row = token_row(record)
        if max(row.input_ids) >= vocabulary:
            raise ValueError(f"token {max(row.input_ids)} of {vocabulary} that there are")
        return row
    messages = record[cfg.data.messages_key]
    return encode_episode(bridge, messages, cfg.data.env_loss_weight, cfg.data.max_length)


def encode_episode(
    bridge: ChatBridge, messages: Sequence[Message], env_weight: float, max_length: int
) -> SFTRow | None:
    """Tokens of an episode in ``append`` history; agent tokens and ends of turns weigh 1, all
    others ``env_weight``, where a message has no ``weight`` of its own.

    An episode longer than ``max_length`` is cut after a whole turn; None when there is no such
    turn, or none that weighs anything.
    """
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if not first:
        raise ValueError("an episode needs a prompt and an assistant message after it")
    ids = bridge.first_prompt(messages[:first])
    weights = [messages[0].get("weight", env_weight)] * len(ids)
    whole_turns = 0
    for said, heard in _turns(messages[first:]):
        spoken = bridge.speak(said["content"])
        ids = [*ids, *spoken]
        weights = weights + [said.get("weight", AGENT_WEIGHT)] * len(spoken)
        if len(ids) > max_length:
            break
        # A row ends with a turn: what is heard after the last whole one is cut off.
        whole_turns = len(ids)
        if heard is not None:
            link = bridge.between(spoken, heard["content"])
            between = [*link.before, *link.observation, *link.after]
            ids = ids + between
            weights = weights + [heard.get("weight", env_weight)] * len(between)
    ids, weights = ids[:whole_turns], weights[:whole_turns]
    return SFTRow(tuple(ids), tuple(weights)) if any(weights[1:]) else None


def _turns(messages: Sequence[Message]) -> Iterator[tuple[Message, Message | None]]:
    """(assistant message, following user message or None); raises ``ValueError`` where the roles do
    not alternate.
    """
    roles = [message["role"] for message in messages]
    if roles != ["assistant" if i % 2 == 0 else "user" for i in range(len(roles))]:
        raise ValueError(
            f"after the prompt, assistant and user messages must alternate; found {roles}"
        )
    for i in range(0, len(messages), 2):
        yield messages[i], messages[i + 1] if i + 1 < len(messages) else None


# ---------------------------------------------------------------------- the policy


def start_policy_problems(cfg: SFTConfig) -> Iterator[str]:
    """Problems of the policy to start from where it is a directory: of one by its hub name they
    show when it was fetched.
    """
    if cfg.model.path and Path(cfg.model.path).is_dir():
        yield from _policy_problems(cfg, Path(cfg.model.path))


def _policy_problems(cfg: SFTConfig, directory: Path) -> Iterator[str]:
    own = cfg.model.tokenizer_path
    said = f"model.path={cfg.model.path!r}"
    trust = cfg.model.trust_remote_code
    place = Path(own) if own else None
    said_tokenizer = f"model.tokenizer_path={own!r}" if own else ""
    yield from policy_problems(said, directory, trust, place, said_tokenizer)


def starting_policy(cfg: SFTConfig, records: list[Record], scratch: Path) -> Path:
    """Directory of the policy to start from: ``model.path``, or a new one, tokenizer included, in
    ``scratch``.
    """
    if cfg.model.path:
        directory = Path(model_directory(cfg.model.path))
        problems = list(_policy_problems(cfg, directory))
        if problems:
            raise ConfigError(problems)
        return directory
    new = cfg.model.new
    expert = get_package(cfg.env.env_name).expert
    # Like the tags: one token each, wherever they stand.
    symbols = expert.symbols(env_settings(cfg.env)) if expert else ()
    key = cfg.data.messages_key
    texts = (message["content"] for record in records for message in record.get(key, ()))
    return build_policy(
        scratch,
        texts,
        words=expert.words() if expert else (),
        tags=(*TAGS, *symbols),
        vocab_size=cfg.model.vocab_size,
        hidden=new.hidden_size,
        layers=new.num_hidden_layers,
        heads=new.num_attention_heads,
        kv_heads=new.num_key_value_heads,
        head_dim=new.head_dim or new.hidden_size // new.num_attention_heads,
        ff=new.intermediate_size,
        max_length=new.max_position_embeddings,
        tie_embeddings=new.tie_word_embeddings,
        seed=derive_seed("sft policy", cfg.trainer.seed) & 0x7FFFFFFF,
    )
