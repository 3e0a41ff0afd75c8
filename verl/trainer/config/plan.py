"""What a run will do, counted before its first step: tasks, rows, optimizer steps, workers, tokens,
rough memory.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.names import MAX_LOGITS
from verl.trainer.config.amounts import notes
from verl.trainer.config.derive import (
    default_group_size,
    is_placeholder,
    iterations,
    known_tasks,
    trajectories_per_iteration,
)
from verl.trainer.config.load import guess_device
from verl.trainer.config.plugged import EXTENSIONS
from verl.trainer.config.schema import PPOConfig, SFTConfig
from verl.trainer.config.schema.sft import NewPolicyConfig
from verl.utils.threads import available_cpus

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINING_BYTES = 16  # master weight, gradient and two moments, float32 each
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the config alone does not say. ``None`` where it is not known yet."""

    cores: int = 1
    memory_gb: float | None = None
    device: str = "cpu"
    train_tasks: int | None = None
    val_tasks: int | None = None
    parameters: int | None = None
    vocab_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The counts of a run.

    ``None``: not known before the tasks or the policy are. Upper bounds say ``at_most``.
    """

    title: str
    device: str
    run_dir: str
    train_tasks: int | None = None
    val_tasks: int | None = None
    tasks_per_iteration: int = 0
    group_size: int = 0
    trajectories: int = 0
    steps_at_most: int = 0
    rows_at_most: int = 0
    mini_batches: int = 0
    epochs: int = 1
    optimizer_steps: int = 0
    iterations: int | None = None
    total_optimizer_steps: int | None = None
    row_tokens: int = 0
    sampled_tokens_at_most: int = 0
    # Sampled besides the turns, by what is sampled: what the extensions of the config add.
    other_tokens_at_most: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    threads_per_rank: int = 1
    engines: int = 0
    threads_per_engine: int = 1
    collectors: int = 0
    env_processes: int = 0
    envs: int = 0
    parameters: int | None = None
    memory_gb: float | None = None
    machine_memory_gb: float | None = None
    default_group_size: int | None = None  # plays of a task where nothing is said
    # Where a number is not what published jobs would make of it, and how to get that.
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[tuple[str, str]]:
        """Label and value of each line a reader wants."""
        ranks = f"{_count(self.ranks, 'training rank')} x {_count(self.threads_per_rank, 'thread')}"
        yield "device", f"{self.device}, {ranks}"
        yield from self._play_lines() if self.engines else ()
        passes = _count(self.epochs, "epoch")
        if self.engines:
            batches = _count(self.mini_batches, "mini-batch", "es")
            steps = _count(self.optimizer_steps, "optimizer step")
            in_all = f"{_known(self.total_optimizer_steps)} optimizer steps"
            yield "updates", f"{batches} x {passes} = {steps} per iteration"
            yield "in all", f"{_known(self.iterations)} iterations, {in_all}"
            yield from (("note", note) for note in self.notes)
        else:
            yield "updates", f"{passes}, {_known(self.total_optimizer_steps)} optimizer steps"
        yield "policy", f"{_known(self.parameters)} parameters"
        yield "memory", _memory(self.memory_gb, self.machine_memory_gb)
        yield "run directory", self.run_dir

    def _play_lines(self) -> Iterator[tuple[str, str]]:
        engines = f"{_count(self.engines, 'engine')} x {_count(self.threads_per_engine, 'thread')}"
        processes = _count(self.env_processes, "environment process", "es")
        envs = _count(self.envs, "environment")
        yield (
            "players",
            f"{engines}, {_count(self.collectors, 'collector')}, {processes} ({envs} at once)",
        )
        yield (
            "tasks",
            f"{_known(self.train_tasks)} to train on, {_known(self.val_tasks)} to validate on",
        )
        unset = f" (env.rollout.n; unset: {self.default_group_size})"
        said = unset if self.default_group_size else ""
        tasks = f"{_count(self.tasks_per_iteration, 'task')} x {self.group_size}{said}"
        plays = _count(self.trajectories, "trajectory", plural="trajectories")
        yield "one iteration", f"{tasks} = {plays}, {self.steps_at_most:,} steps at most"
        yield "rows", f"{self.rows_at_most:,} at most, {self.row_tokens:,} tokens each at most"
        others = [f" + {count:,} of {what}" for what, count in self.other_tokens_at_most.items()]
        yield "sampled tokens", f"{self.sampled_tokens_at_most:,} at most{''.join(others)}"

    def text(self) -> str:
        """The plan as plain text."""
        rows = list(self.lines())
        width = max(len(label) for label, _ in rows)
        return "\n".join([self.title, *(f"  {label:<{width}}  {value}" for label, value in rows)])

    def table(self) -> Any:
        """The plan as a rich table."""
        from rich.table import Table

        table = Table(title=self.title, show_header=False, title_justify="left")
        for label, value in self.lines():
            table.add_row(label, value)
        return table

    def problems(self) -> list[str]:
        """What cannot work on this machine: on CPU, memory that is not there."""
        needed = self.memory_gb
        there = self.machine_memory_gb
        # What is counted is the host's memory, which says nothing about what fits on a GPU.
        if self.device != "cpu" or needed is None or there is None or needed <= there:
            return []
        fix = (
            "fewer tokens or rows per micro-batch, fewer engines, "
            "a smaller actor_rollout_ref.rollout.kv_cache_gb"
        )
        return [f"plan: needs {_memory(needed, there)}; fix: {fix}"]

    def as_dict(self) -> dict[str, Any]:
        """The counts, ready for JSON."""
        return dataclasses.asdict(self)


def _count(number: int, noun: str, suffix: str = "s", plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + suffix}"


def _known(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _memory(needed: float | None, there: float | None) -> str:
    text = (
        "?"
        if needed is None
        else f"about {needed:.1f} GiB per node for weights, optimizer, engines and logits"
    )
    return text if there is None else f"{text}; this machine has {there:.1f} GiB"


def gather_facts(cfg: PPOConfig | SFTConfig) -> Facts:
    """What can be known here without importing torch: cores, memory, and the size of a policy on
    disk.
    """
    pages = (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    )
    path = cfg.actor_rollout_ref.model.path if isinstance(cfg, PPOConfig) else cfg.model.path
    parameters, vocab = None, None
    # A torn file is said by the checks that read the model; here its size is not known.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        parameters, vocab = _policy_size(Path(path)) if path else (None, None)
    if path is None and isinstance(cfg, SFTConfig):
        vocab = cfg.model.vocab_size
        parameters = _new_policy_size(cfg.model.new, vocab)
    return Facts(
        cores=available_cpus(),
        memory_gb=pages / GIB if pages else None,
        device=guess_device(cfg.trainer.device),
        parameters=parameters,
        vocab_size=vocab,
    )


def _policy_size(path: Path) -> tuple[int | None, int | None]:
    """Parameters and vocabulary of a policy directory, from its safetensors headers and its
    ``config.json``.
    """
    config = path / "config.json"
    if not config.is_file():
        return None, None
    parameters = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            # safetensors: the header's length in 8 bytes, then the header as JSON; no weight is
            # read.
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        parameters += sum(
            math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        )
    return parameters or None, json.loads(config.read_text()).get("vocab_size")


def _new_policy_size(new: NewPolicyConfig, vocab: int) -> int:
    head = new.head_dim or new.hidden_size // new.num_attention_heads
    # Query and output per attention head, key and value per key/value head.
    attention = new.hidden_size * head * 2 * (new.num_attention_heads + new.num_key_value_heads)
    # SwiGLU has three matrices; besides, two norms of the layer's width, and two of a head's (over
    # queries and keys).
    layer = attention + 3 * new.hidden_size * new.intermediate_size + 2 * new.hidden_size + 2 * head
    embeddings = vocab * new.hidden_size * (1 if new.tie_word_embeddings else 2)
    # The last term is the norm behind the last layer.
    return embeddings + new.num_hidden_layers * layer + new.hidden_size


def make_plan(cfg: PPOConfig | SFTConfig, facts: Facts | Mapping[str, Any] | None = None) -> Plan:
    """Count what ``cfg`` (a derived ``PPOConfig`` or ``SFTConfig``) will do.

    ``facts`` default to ``gather_facts``.
    """
    if facts is None:
        facts = gather_facts(cfg)
    elif isinstance(facts, Mapping):
        facts = Facts(**facts)
    return _ppo_plan(cfg, facts) if isinstance(cfg, PPOConfig) else _sft_plan(cfg, facts)


def _ppo_plan(cfg: PPOConfig, facts: Facts) -> Plan:
    env = cfg.env
    data = cfg.data
    actor = cfg.actor_rollout_ref.actor
    rollout = cfg.actor_rollout_ref.rollout
    trainer = cfg.trainer
    append = env.history == "append"
    played = trajectories_per_iteration(cfg)
    steps = played * env.max_steps
    train_tasks = facts.train_tasks if facts.train_tasks is not None else known_tasks(cfg.env)
    known = trainer.total_training_steps is not None or train_tasks is not None
    known = known or is_placeholder(data.train_files)
    rounds = iterations(cfg, train_tasks or 0) if known else None
    updates = actor.ppo_mini_batches * actor.ppo_epochs
    others = [extension.sampled_tokens(cfg, steps) for extension in EXTENSIONS.values()]
    # With append the response holds the whole play, and its bound is one for all turns together.
    turn = (
        min(data.max_response_length, env.max_steps * env.max_turn_tokens)
        if append
        else env.max_turn_tokens
    )
    run = f"{trainer.project_name}/{trainer.experiment_name}"
    return Plan(
        title=f"{run}: {cfg.algorithm.adv_estimator} on {env.env_name}",
        device=facts.device,
        run_dir=trainer.default_local_dir,
        train_tasks=train_tasks,
        val_tasks=facts.val_tasks if facts.val_tasks is not None else env.val_tasks,
        tasks_per_iteration=data.train_batch_size,
        group_size=env.rollout.n,
        trajectories=played,
        steps_at_most=steps,
        rows_at_most=played if append else steps,
        mini_batches=actor.ppo_mini_batches,
        epochs=actor.ppo_epochs,
        optimizer_steps=updates,
        iterations=rounds,
        total_optimizer_steps=None if rounds is None else rounds * updates,
        row_tokens=data.max_prompt_length + data.max_response_length,
        sampled_tokens_at_most=(played if append else steps) * turn,
        other_tokens_at_most={what: count for found in others for what, count in found.items()},
        ranks=trainer.n_gpus_per_node * trainer.nnodes,
        threads_per_rank=trainer.num_threads or max(1, facts.cores // trainer.n_gpus_per_node),
        engines=rollout.num_workers,
        threads_per_engine=rollout.num_threads or max(1, facts.cores // rollout.num_workers),
        collectors=env.num_collectors,
        env_processes=env.num_workers,
        envs=env.num_workers * env.envs_per_worker,
        parameters=facts.parameters,
        memory_gb=_ppo_memory(cfg, facts),
        machine_memory_gb=facts.memory_gb,
        default_group_size=default_group_size(cfg),
        notes=tuple(notes(cfg)),
    )


def _ppo_memory(cfg: PPOConfig, facts: Facts) -> float | None:
    """Rough GiB per node: trained and frozen copies, engines with their caches, logits of one
    micro-batch.

    A lower bound while the policy is not there yet; None where nothing can be said.
    """
    if facts.parameters is None and facts.device != "cpu":
        return None
    parameters = facts.parameters or 0
    actor = cfg.actor_rollout_ref.actor
    rollout = cfg.actor_rollout_ref.rollout
    trainer = cfg.trainer
    row = cfg.data.max_prompt_length + cfg.data.max_response_length
    micro = (
        actor.ppo_max_token_len_per_gpu
        if actor.use_dynamic_bsz
        else row * (actor.ppo_micro_batch_size_per_gpu or 1)
    )
    # The critic has the policy's architecture: it counts as a second trained copy.
    trained = 1 + bool(cfg.critic.enable)
    # A frozen copy: float32 weights, neither gradient nor moments.
    reference = 4 if actor.use_kl_loss or cfg.algorithm.use_kl_in_reward else 0
    weights = parameters * (TRAINING_BYTES * trained + reference) / trainer.nnodes
    engines = rollout.num_workers * (parameters * BYTES[rollout.dtype] + rollout.kv_cache_gb * GIB)
    logits = _logit_bytes(micro, facts) * trainer.n_gpus_per_node
    # Weights and engines are spread over the nodes; logits are counted for the ranks of one node.
    return (weights + engines / trainer.nnodes + logits) / GIB


def _logit_bytes(tokens: int, facts: Facts) -> int:
    """Float32 logits of a micro-batch of ``tokens`` on one rank, and their gradient; they are
    computed in pieces.
    """
    # Twice (values and gradient) 4 bytes; MAX_LOGITS bounds the piece that exists at a time.
    return 2 * 4 * min(tokens * (facts.vocab_size or 0), MAX_LOGITS)


def _sft_plan(cfg: SFTConfig, facts: Facts) -> Plan:
    trainer = cfg.trainer
    data = cfg.data
    memory = None
    if facts.parameters is not None:
        logits = _logit_bytes(data.max_token_len_per_gpu, facts)
        memory = (facts.parameters * TRAINING_BYTES + logits * trainer.n_gpus_per_node) / GIB
    run = f"{trainer.project_name}/{trainer.experiment_name}"
    return Plan(
        title=f"{run}: imitation of {data.episodes:,} episodes",
        device=facts.device,
        run_dir=trainer.default_local_dir,
        epochs=trainer.total_epochs,
        optimizer_steps=1,
        iterations=trainer.total_training_steps,
        total_optimizer_steps=trainer.total_training_steps,
        row_tokens=data.max_length,
        ranks=trainer.n_gpus_per_node * trainer.nnodes,
        threads_per_rank=trainer.num_threads or max(1, facts.cores // trainer.n_gpus_per_node),
        parameters=facts.parameters,
        memory_gb=memory,
        machine_memory_gb=facts.memory_gb,
    )
