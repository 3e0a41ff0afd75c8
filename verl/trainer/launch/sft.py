"""Construction of a supervised run.

    episodes ─▶ messages ─▶ policy and tokenizer (new or given) ─▶ token rows ─▶ ranks ─▶ HF

Messages are tokenised exactly as in a rollout, so the policy samples the token sequences on which
it was trained.
"""

import contextlib
import logging
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from transformers import AutoTokenizer

from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.environments.experts.demonstrations import (
    NoExpertError,
    get_expert,
    write_demonstrations,
)
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import NO_LIMITS, TokenLimits
from agent_system.tokens.dialogues import EpisodeDialogues
from agent_system.tokens.replies import get_reply_reader
from agent_system.tokens.template_support import (
    TemplateSupport,
    TemplateVerdict,
    check_template_support,
)
from rlvcr.levels import TAGS
from verl.config.cold_start import build_cold_start_config, get_cold_start_config_name
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, Problem, value_at_path
from verl.models.hub import model_directory
from verl.models.loader import build_meta_model, read_config
from verl.models.new_policy import build_policy
from verl.record.run_dir import RunDirectory
from verl.trainer.launch.preflight_lora import find_target_problems
from verl.trainer.launch.preflight_weights import find_policy_problems
from verl.trainer.launch.sft_ranks import SFT_COMMAND, SFTJob, count_local_ranks, train_on_ranks
from verl.trainer.sft.resume import choose_sft_checkpoint
from verl.trainer.sft.rows import (
    AGENT_WEIGHT,
    LOCATION_KEY,
    TOKENS_COLUMN,
    Record,
    SFTRow,
    make_token_row,
    plan_batches,
    read_records,
)
from verl.utils.chat_template import UnsupportedTemplateError
from verl.utils.files import require_replaceable_directory
from verl.utils.logging import setup_logging
from verl.utils.message_rows import Message
from verl.utils.processes import available_cpus, die_with_parent
from verl.utils.progress import enable_heartbeat_file
from verl.utils.sampling import SamplingResult, StopReason
from verl.utils.seeds import derive_seed, seed_everything
from verl.utils.stacks import install_stack_dump_handler
from verl.utils.tables import read_rows
from verl.utils.watchdog import watch_run

logger = logging.getLogger(__name__)
# Config keys that rlvcr.settings adds to SFTConfig.
LEVELS_KEY = "data.levels"
NEEDED_SHARE_KEY = "data.needed_level_share"


def run_sft(cfg: SFTConfig) -> Path:
    """Train the policy of ``cfg`` and return its directory."""
    start_time = time.perf_counter()
    cfg = cfg.as_frozen()
    trainer_config = cfg.trainer
    check_save_path(cfg)
    torch.set_num_threads(trainer_config.num_threads or available_cpus())
    seed_everything(trainer_config.seed)
    directory = RunDirectory(trainer_config.default_local_dir)
    timeouts = (trainer_config.waiting_log_s, trainer_config.stall_timeout_s)
    with (
        directory.open(cfg, {"trainer": trainer_config.seed}) as run,
        run.log_resume_hint_on_interrupt(cfg.trainer.resume_mode),
        watch_run(run.logs, *timeouts) as enter_stage,
    ):
        setup_logging(run.logs / "sft.log")
        enter_stage("episodes")
        train_records, held_out_records = load_records(cfg)
        enter_stage("tokens")
        with tempfile.TemporaryDirectory(prefix="policy-") as scratch_directory:
            initial_policy_directory = prepare_initial_policy(
                cfg, train_records, Path(scratch_directory)
            )
            tokenizer_path = cfg.model.tokenizer_path or initial_policy_directory
            tokenizer = AutoTokenizer.from_pretrained(
                tokenizer_path, trust_remote_code=cfg.model.trust_remote_code
            )
            rows = make_rows(cfg, train_records, tokenizer)
            batches = plan_batches(
                [len(row) for row in rows],
                cfg.data.tokens_per_batch,
                trainer_config.total_epochs,
                trainer_config.total_training_steps,
                trainer_config.seed,
                cfg.data.shuffle,
            )
            job = SFTJob(
                cfg=cfg,
                run_dir=run.path,
                checkpoints=run.checkpoints,
                log_file=run.logs / "sft.log",
                initial_policy_directory=initial_policy_directory,
                tokenizer=str(tokenizer_path),
                rows=rows,
                batches=batches,
                val_rows=make_rows(cfg, held_out_records, tokenizer),
                resumed_checkpoint=choose_sft_checkpoint(cfg, run.checkpoints, rows, batches),
            )
            enter_stage("imitation")
            train_on_ranks(job, trainer_config.n_gpus_per_node)
    save_path = Path(cfg.model.save_path)
    logger.info("policy: %s (%.0f s in all)", save_path, time.perf_counter() - start_time)
    return save_path


def create_policy(cfg: PPOConfig) -> None:
    """Create the missing policy of a PPO run by supervised training in a subprocess."""
    path = Path(str(cfg.actor_rollout_ref.model.path))
    logger.info("no policy at %s: cold start with config %s", path, get_cold_start_config_name(cfg))
    # Use spawn: a forked child would inherit held locks, but not the threads that release them.
    process = multiprocessing.get_context("spawn").Process(
        target=run_cold_start, args=(build_cold_start_config(cfg),)
    )
    process.start()
    try:
        process.join()
    finally:
        process.kill()  # after an interruption; the incomplete policy is not used
        process.join()
    if process.exitcode != 0 or not path.exists():
        raise RuntimeError(
            f"the cold start ended with exit status {process.exitcode} and wrote no policy to "
            f"{path}; see its error above"
        )


def run_cold_start(cfg: SFTConfig) -> None:
    """Run the supervised training of a missing policy in this subprocess, on all available GPUs."""
    die_with_parent()
    install_stack_dump_handler("cold start")
    enable_heartbeat_file()
    # The terminal sends Ctrl-C to child processes too. Ignore it: the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_sft(cfg.with_values({"trainer.n_gpus_per_node": count_local_ranks(cfg)}))


def check_save_path(cfg: SFTConfig) -> None:
    """Raise ``ConfigError`` if the run must not replace the contents of ``model.save_path``."""
    input_paths = (cfg.model.path, cfg.model.tokenizer_path, cfg.data.data_dir)
    protected_paths = [Path(path) for path in input_paths if path and Path(path).exists()]
    protected_paths.append(Path(cfg.trainer.default_local_dir))
    require_replaceable_directory(
        Path(cfg.model.save_path),
        "model.save_path",
        cfg.model.overwrite,
        protected_paths,
        SFT_COMMAND,
    )


# ---------------------------------------------------------------------- episodes


def load_records(cfg: SFTConfig) -> tuple[list[Record], list[Record]]:
    """Return training and held-out records, from files or from the environment's expert."""
    data = cfg.data
    if data.train_files:
        return read_records(data, "train"), read_records(data, "val")
    check_expert(cfg)
    path = write_demonstrations(
        cfg.env.env_name,
        read_env_settings(cfg.env),
        data.data_dir,
        num_episodes=data.episodes + data.val_episodes,
        seed=cfg.env.seed,
        num_workers=data.num_workers,
        useless_share=data.noise,
        levels=value_at_path(cfg, LEVELS_KEY),
        needed_level_share=value_at_path(cfg, NEEDED_SHARE_KEY),
        window=cfg.env.history_length if data.history == "window" else None,
    )
    train_records, held_out_records = split_held_out(list(read_rows(path)), data.val_episodes)
    if not train_records:
        raise ConfigError(
            f"data.val_episodes={data.val_episodes}: no episode remains for training; allowed: "
            "a number that leaves episodes of other tasks; fix: raise data.episodes",
            "no_rows",
        )
    return train_records, held_out_records


def check_expert(cfg: SFTConfig) -> None:
    """Raise ``ConfigError`` unless the environment has an expert that supports the settings.

    An expert is a program that solves the tasks. It must write a thought for each thinking level in
    ``data.levels``. With a positive ``data.needed_level_share`` it must also know the required
    level of each turn, the lowest level that suffices.
    """
    env_name = cfg.env.env_name
    levels = value_at_path(cfg, LEVELS_KEY)
    needed_level_share = value_at_path(cfg, NEEDED_SHARE_KEY)
    try:
        expert = get_expert(env_name)
    except NoExpertError as error:
        fix = "set data.train_files to files with episodes"
        message = f"env.env_name={env_name!r}: {error}; fix: {fix}"
        raise ConfigError(message, "unknown_name") from error
    env_settings = read_env_settings(cfg.env)
    if not set(levels) <= set(expert.levels):
        allowed = ", ".join(map(str, expert.levels))
        raise ConfigError(
            f"data.levels={levels!r}: the expert of {env_name!r} has no thoughts for all of them; "
            f"allowed: any of {allowed}; fix: set data.levels=[{allowed}]",
            "out_of_range",
        )
    if needed_level_share and not expert.names_needed_level(env_settings):
        raise ConfigError(
            f"data.needed_level_share={needed_level_share}: the expert of {env_name!r} does not "
            "know the required level of a turn; allowed: 0; fix: set data.needed_level_share=0",
            "out_of_range",
        )


def split_held_out(records: list[Record], num_held_out: int) -> tuple[list[Record], list[Record]]:
    """Return training records and held-out records, which share no task.

    The held-out records are the last ``num_held_out`` records. Other records of their tasks are
    dropped.
    """
    if not num_held_out:
        return records, []
    held_out = records[-num_held_out:]
    held_out_tasks = {record["task_id"] for record in held_out}
    other_records = records[:-num_held_out]
    return [record for record in other_records if record["task_id"] not in held_out_tasks], held_out


def make_rows(cfg: SFTConfig, records: Sequence[Record], tokenizer) -> list[SFTRow]:
    """Return the rows of ``records``: token ids with loss weights.

    Messages are tokenised as in a rollout. Raises ``ConfigError`` if a record is invalid, or if
    none fits into ``data.max_length``.
    """
    rows_per_record = list(encode_records(cfg, records, tokenizer))
    rows = [row for rows in rows_per_record for row in rows]
    if records and not rows:
        raise ConfigError(
            f"data.max_length={cfg.data.max_length}: none of {len(records)} episodes has a turn "
            "that fits; allowed: the tokens of a prompt and an answer; fix: raise data.max_length",
            "does_not_fit",
        )
    if not all(rows_per_record):
        logger.warning(
            "%d episodes are dropped: their first turn does not fit into data.max_length",
            rows_per_record.count([]),
        )
    return rows


def encode_records(cfg: SFTConfig, records: Iterable[Record], tokenizer) -> Iterator[list[SFTRow]]:
    """Yield the token rows of each record; [] if no turn of it fits into ``data.max_length``.

    Raises ``ConfigError`` if the tokenizer or its chat template cannot render a record.
    """
    data = cfg.data
    chat_bridge = None
    template_support = None
    for record in records:
        try:
            if TOKENS_COLUMN in record:
                yield [_make_row_within_vocabulary(record, len(tokenizer))]
                continue
            # Create the objects that need a chat template on first use: records of token ids need
            # no chat template.
            template_support = template_support or check_template_support(
                tokenizer, data.apply_chat_template_kwargs
            )
            chat_bridge = chat_bridge or ChatBridge(tokenizer, data.apply_chat_template_kwargs)
            messages = record[data.messages_key]
            if data.history == "chat":
                template_support.check_history_support("chat")
                yield encode_chat_episode(chat_bridge, messages, data.max_length)
                continue
            _require_renderable_messages(template_support, messages)
            row = encode_episode(chat_bridge, messages, data.env_loss_weight, data.max_length)
            yield [row] if row else []
        except UnsupportedTemplateError as error:
            raise ConfigError(
                f"model.path={cfg.model.path!r}: {error}; allowed: a chat template that renders "
                "the episodes of data.train_files; fix: put another chat_template.jinja into its "
                "directory, or set data.history=chat, or use episodes of one turn",
                "unsupported_template",
            ) from error
        except ValueError as error:
            record_location = record.get(LOCATION_KEY, "an episode of the expert")
            raise ConfigError(
                f"{record_location}: {error}; allowed: rows that the tokenizer and its chat "
                "template support; fix: remove the row, or use another policy",
                "unsupported_template",
            ) from error


def _require_renderable_messages(
    template_support: TemplateSupport, messages: Sequence[Message]
) -> None:
    """Raise ``UnsupportedTemplateError`` if the chat template does not suit the episode's messages.

    ``template_support`` has the results of test renderings. The template must have a generation
    prompt. It must not change earlier turns: with several turns, the text up to a turn must begin
    with the text up to the turn before.
    """
    template_support.check_history_support("window")
    num_turns = sum(message["role"] == "assistant" for message in messages)
    if num_turns > 1 and template_support.verdict is not TemplateVerdict.APPEND:
        raise UnsupportedTemplateError(
            f"episodes of several turns cannot be rendered: {template_support.reason}"
        )


def _make_row_within_vocabulary(record: Record, vocabulary_size: int) -> SFTRow:
    row = make_token_row(record)
    if max(row.input_ids) >= vocabulary_size:
        raise ValueError(
            f"token id {max(row.input_ids)} is not below the vocabulary size {vocabulary_size}"
        )
    return row


def encode_episode(
    bridge: ChatBridge, messages: Sequence[Message], env_weight: float, max_length: int
) -> SFTRow | None:
    """Return the conversation ``messages`` as one row of token ids with loss weights.

    In ``messages``, assistant and user messages alternate after the prompt. A message may have a
    ``weight``, the loss weight of its tokens. By default the tokens of the agent, including the
    end-of-turn token, have weight 1. All other tokens have ``env_weight``. An episode longer than
    ``max_length`` tokens is truncated after a whole turn. Return None if no whole turn fits, or if
    all weights are 0.
    """
    first_reply_index = [message["role"] for message in messages].index("assistant")
    token_ids = bridge.encode_first_prompt(messages[:first_reply_index])
    loss_weights = [messages[0].get("weight", env_weight)] * len(token_ids)
    agent_mask = [False] * len(token_ids)
    length_of_whole_turns = 0
    replies = messages[first_reply_index::2]
    observations = messages[first_reply_index + 1 :: 2]
    # The last reply may have no observation.
    for reply, observation in zip_longest(replies, observations):
        reply_ids = bridge.encode_turn(reply["content"])
        token_ids = [*token_ids, *reply_ids]
        loss_weights = loss_weights + [reply.get("weight", AGENT_WEIGHT)] * len(reply_ids)
        agent_mask += [True] * len(reply_ids)
        if len(token_ids) > max_length:
            break
        # A row ends with an assistant message. Tokens of an observation after that message are
        # removed below.
        length_of_whole_turns = len(token_ids)
        if observation is not None:
            inter_turn_tokens = bridge.make_inter_turn_tokens(reply_ids, observation["content"])
            observation_ids = [
                *inter_turn_tokens.ids_before,
                *inter_turn_tokens.observation,
                *inter_turn_tokens.ids_after,
            ]
            token_ids = token_ids + observation_ids
            loss_weights = loss_weights + [observation.get("weight", env_weight)] * len(
                observation_ids
            )
            agent_mask += [False] * len(observation_ids)
    row_length = length_of_whole_turns
    if not any(loss_weights[1:row_length]):
        return None
    return SFTRow(
        tuple(token_ids[:row_length]),
        tuple(loss_weights[:row_length]),
        tuple(agent_mask[:row_length]),
    )


def encode_chat_episode(
    bridge: ChatBridge, messages: Sequence[Message], max_length: int
) -> list[SFTRow]:
    """Return the rows of an episode with ``chat`` history, as a rollout makes them.

    A new row begins where the chat template changes earlier turns. Only replies have loss weights,
    and each reply has them in one row only. There it follows the prompt that the policy would see.
    The rows end before the first reply that exceeds ``max_length`` tokens with its prompt.
    """
    if any(m.get("weight") for m in messages if m["role"] != "assistant"):
        raise ValueError("with data.history=chat only messages of the assistant have a loss weight")
    episode_dialogues = EpisodeDialogues(bridge, NO_LIMITS, "chat")
    plain_messages = [
        {"role": message["role"], "content": message["content"]} for message in messages
    ]
    weight_by_turn: dict[int, float] = {}
    for message_index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        reply_ids = encode_reply(bridge, message["content"])
        limits = TokenLimits(max_total=max_length, max_turn=len(reply_ids))
        dialogue = episode_dialogues.open_dialogue(
            plain_messages[:message_index], message_index, limits=limits
        )
        if dialogue is None:
            break
        weight_by_turn[message_index] = message.get("weight", AGENT_WEIGHT)
        reply = SamplingResult("", list(reply_ids), [0.0] * len(reply_ids), StopReason.STOP, 0)
        dialogue.add_reply(reply, message_index, message["content"])
    rows = []
    for token_ledger in episode_dialogues.ledgers:
        row_weights = [0.0] * len(token_ledger)
        for segment in token_ledger.agent_segments:
            segment_weights = [weight_by_turn[segment.turn]] * len(segment.ids)
            row_weights[segment.start : segment.end_position] = segment_weights
        if any(row_weights):
            rows.append(SFTRow(tuple(token_ledger.token_ids), tuple(row_weights)))
    return rows


def encode_reply(bridge: ChatBridge, text: str) -> tuple[int, ...]:
    """Return the tokens that a policy samples for the reply ``text``, with its end of turn.

    The chat template renders ``text``. If it removes the thought from ``text``, as some templates
    do, ``text`` is encoded without the template. Raises ``ValueError`` if the generation prompt
    ends with the opening tag of a thought but ``text`` has no thought.
    """
    thought_opening_tag = get_reply_reader(bridge).thought_opening_tag
    with contextlib.suppress(UnsupportedTemplateError):
        reply_ids = bridge.encode_turn(text)
        rendered_text = thought_opening_tag + bridge.decode(reply_ids)
        if "".join(text.split()) in "".join(rendered_text.split()):
            return reply_ids
    opening_tag = thought_opening_tag.strip()
    if not text.lstrip().startswith(opening_tag):
        raise ValueError(
            f"the prompt opens a thought, but the reply {text[:80]!r} has none in {opening_tag} "
            "tags (data.apply_chat_template_kwargs={enable_thinking: false} may open none)"
        )
    if opening_tag:
        text_after_tag = text.lstrip().removeprefix(opening_tag)
        text = text_after_tag.removeprefix(thought_opening_tag.partition(opening_tag)[2])
    return bridge.encode_turn(text, is_rendered=False)


# ---------------------------------------------------------------------- the policy


def find_initial_policy_problems(cfg: SFTConfig, directory: Path) -> Iterator[Problem]:
    """Yield problems of the initial policy in ``directory`` and of its tokenizer."""
    model = cfg.model
    path = model.tokenizer_path
    problems = list(
        find_policy_problems(
            f"model.path={model.path!r}",
            directory,
            model.trust_remote_code,
            tokenizer_directory=Path(path) if path else None,
            tokenizer_setting=f"model.tokenizer_path={path!r}" if path else "",
            needs_transformers=True,
            override_config=model.override_config,
        )
    )
    if model.lora_rank and not problems:
        config = read_config(directory, model.trust_remote_code, model.override_config)
        meta_model = build_meta_model(config, model.trust_remote_code)
        problems += find_target_problems(cfg, "model", model, meta_model)
    yield from problems


def prepare_initial_policy(cfg: SFTConfig, records: list[Record], scratch_directory: Path) -> Path:
    """Return the directory of the initial policy.

    This is ``model.path`` if it is set, else a new policy in ``scratch_directory``. A new policy
    gets a new tokenizer for the texts of ``records``. Raises ``ConfigError`` if the policy at
    ``model.path`` has problems.
    """
    if cfg.model.path:
        directory = Path(model_directory(cfg.model.path))
        problems = list(find_initial_policy_problems(cfg, directory))
        if problems:
            raise ConfigError(problems)
        return directory
    expert = get_package(cfg.env.env_name).expert
    # The expert (a scripted agent) may declare texts with punctuation or spaces. Each becomes one
    # token of the new tokenizer, like a tag.
    symbols = expert.symbols(read_env_settings(cfg.env)) if expert else ()
    messages_key = cfg.data.messages_key
    message_texts = (
        message["content"] for record in records for message in record.get(messages_key, ())
    )
    return build_policy(
        scratch_directory,
        message_texts,
        cfg.model.new,
        words=expert.words() if expert else (),
        tags=(*TAGS, *symbols),
        vocab_size=cfg.model.vocab_size,
        seed=derive_seed("sft policy", cfg.trainer.seed) & 0x7FFFFFFF,
    )
