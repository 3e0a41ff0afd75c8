"""What a run will do, counted before its first step: tasks, rows, optimizer steps, workers, tokens,
rough memory.
"""

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.config.amounts import notes
from verl.config.cold_start import cold_start_config, cold_start_name
from verl.config.derive import (
    declared_tasks,
    default_group_size,
    engine_count,
    engine_gpus,
    engines_on_a_node,
    have_own_gpus,
    is_placeholder,
    iterations,
    known_tasks,
    trajectories_per_iteration,
    weight_transfer,
)
from verl.config.load import guess_device
from verl.config.memory import (
    GIB,
    TRAINING_BYTES,
    PolicySize,
    cpu_node_bytes,
    gpu_node_bytes,
    logit_bytes,
    memory_problems,
    update_bytes,
)
from verl.config.plugged import EXTENSIONS
from verl.config.policy_size import new_policy_size, policy_size
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings.cpus import available_cpus

WAYS = {
    "store": "through the object store",
    "ipc": "by CUDA IPC, from the GPUs that engines and training ranks share",
    "nccl": "by NCCL, from the first training rank to the GPUs of the engines",
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the config alone does not say. ``None`` where it is not known yet."""

    cores: int = 1
    memory_gb: float | None = None
    device: str = "cpu"
    train_tasks: int | None = None
    val_tasks: int | None = None
    parameters: int | None = None
    trained_parameters: int | None = None  # of LoRA's adapters
    made_by: str = ""  # the config of the cold start that makes the policy
    audit: str = ""  # what main_audit generates
    vocab_size: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    device_memory_gb: float | None = None  # of one GPU

    @property
    def size(self) -> PolicySize:
        """What is known of the policy."""
        names = [field.name for field in dataclasses.fields(PolicySize)]
        return PolicySize(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class Plan:
    """The counts of a run.

    ``None``: not known before the tasks or the policy are. Upper bounds say ``at_most``.
    """

    title: str
    device: str
    run_dir: str
    checkpoints: str = ""
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
    gpus_per_engine: int = 1
    engine_gpus: int = 0  # on which nothing is trained
    weight_transfer: str = "store"
    threads_per_engine: int = 1
    collectors: int = 0
    env_processes: int = 0
    envs: int = 0
    evaluates: bool = False  # trains nothing: an evaluation on validation tasks, or an audit
    audit: str = ""  # what an audit generates
    panel_plays: int = 1  # of each task of the panel
    sampling: str = ""  # how the panel is played
    policy: str | None = None  # where it is from
    parameters: int | None = None
    trained_parameters: int | None = None
    lora_rank: int = 0
    made_by: str = ""
    memory_gb: float | None = None
    machine_memory_gb: float | None = None
    device_memory_gb: float | None = None  # needed on a GPU by an update
    gpu_problems: tuple[str, ...] = ()  # what does not fit there, or on its host
    default_group_size: int | None = None  # plays of a task where nothing is said
    stand_in: str = ""  # what is played in place of what the config names
    # Where a number is not what published jobs would make of it, and how to get that.
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[tuple[str, str]]:
        """Label and value of each line a reader wants."""
        ranks = f"{_count(self.ranks, 'training rank')} x {_count(self.threads_per_rank, 'thread')}"
        yield "device", f"{self.device}, {ranks}"
        yield from self._play_lines() if self.engines else ()
        if self.stand_in:
            yield "stand-in", f"{self.stand_in}: not comparable with published numbers"
        passes = _count(self.epochs, "epoch")
        if self.evaluates:
            yield from self._evaluation_lines()
        elif self.engines:
            batches = _count(self.mini_batches, "mini-batch", "es")
            steps = _count(self.optimizer_steps, "optimizer step")
            in_all = f"{_known(self.total_optimizer_steps)} optimizer steps"
            yield "updates", f"{batches} x {passes} = {steps} per iteration"
            yield "in all", f"{_known(self.iterations)} iterations, {in_all}"
            yield from (("note", note) for note in self.notes)
        else:
            yield "updates", f"{passes}, {_known(self.total_optimizer_steps)} optimizer steps"
        yield "policy", self._policy()
        yield "memory", _memory(self.memory_gb, self.machine_memory_gb, self.device_memory_gb)
        yield "run directory", self.run_dir
        yield "checkpoints", self.checkpoints

    def _policy(self) -> str:
        text = f"{_known(self.parameters)} parameters"
        if self.made_by:
            text += f", made first by a cold start ({self.made_by})"
        if self.lora_rank:
            trained = _known(self.trained_parameters)
            text += f"; LoRA of rank {self.lora_rank}: {trained} of its own are trained"
        return f"{text}; {self.policy}" if self.evaluates else text

    def _evaluation_lines(self) -> Iterator[tuple[str, str]]:
        tasks = f"{_known(self.val_tasks)} tasks x {_count(self.panel_plays, 'play')}"
        plays = None if self.val_tasks is None else self.val_tasks * self.panel_plays
        evaluation = f"{tasks} = {_known(plays)} trajectories, {self.sampling}"
        yield ("audit", self.audit) if self.audit else ("evaluation", evaluation)
        yield "updates", "none: nothing is trained"

    def _play_lines(self) -> Iterator[tuple[str, str]]:
        engines = f"{_count(self.engines, 'engine')} x {_count(self.threads_per_engine, 'thread')}"
        if self.gpus_per_engine > 1:
            engines += f" on {self.gpus_per_engine} GPUs each"
        if self.engine_gpus:
            engines += f" ({_count(self.engine_gpus, 'GPU')} of their own)"
        processes = _count(self.env_processes, "environment process", "es")
        envs = _count(self.envs, "environment")
        yield (
            "players",
            f"{engines}, {_count(self.collectors, 'collector')}, {processes} ({envs} at once)",
        )
        if self.device != "cpu":
            yield "weights", f"to the engines {WAYS[self.weight_transfer]}"
        if self.evaluates:
            return
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
        """What cannot work on this machine: memory that is not there, of host or GPU."""
        needed = self.memory_gb
        there = self.machine_memory_gb
        if self.device != "cpu":
            return list(self.gpu_problems)
        if needed is None or there is None or needed <= there:
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


def _memory(needed: float | None, there: float | None, on_gpu: float | None = None) -> str:
    what = "for weights, optimizer, engines and logits" if on_gpu is None else "of host memory"
    text = "?" if needed is None else f"about {needed:.1f} GiB per node {what}"
    if on_gpu is not None:
        text = f"about {on_gpu:.1f} GiB per GPU for an update; {text}"
    return text if there is None else f"{text}; this machine has {there:.1f} GiB"


def gather_facts(cfg: PPOConfig | SFTConfig) -> Facts:
    """What can be known here without importing torch: cores, memory, and the size of a policy on
    disk.
    """
    pages = (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    )
    size = PolicySize()
    # A torn file is said by the checks that read the model, and a cold start that cannot be
    # composed by its own; here the size is not known.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        size = _size_of(cfg)
    device = guess_device(cfg.trainer.device)
    return Facts(
        cores=available_cpus(),
        memory_gb=pages / GIB if pages else None,
        device=device,
        device_memory_gb=_gpu_memory_gb() if device == "cuda" else None,
        made_by=cold_start_name(cfg) if isinstance(cfg, PPOConfig) and _is_made(cfg) else "",
        **dataclasses.asdict(size),
    )


def _size_of(cfg: PPOConfig | SFTConfig) -> PolicySize:
    """The size of the policy that is there, or that will be made."""
    if isinstance(cfg, PPOConfig) and _is_made(cfg):
        cfg = cold_start_config(cfg)
    path = cfg.actor_rollout_ref.model.path if isinstance(cfg, PPOConfig) else cfg.model.path
    if path is None and isinstance(cfg, SFTConfig):
        vocab = cfg.model.vocab_size
        return PolicySize(new_policy_size(cfg.model.new, vocab), vocab)
    return policy_size(Path(path)) if path else PolicySize()


def _is_made(cfg: PPOConfig) -> bool:
    path = cfg.actor_rollout_ref.model.path
    return cfg.cold_start.enable and path is not None and not Path(path).exists()


def _gpu_memory_gb() -> float | None:
    """GiB of the smallest GPU here, as the driver's own tool tells; None where it does not."""
    ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in said.split()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


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
    val_tasks = facts.val_tasks if facts.val_tasks is not None else _val_tasks(cfg)
    known = trainer.total_training_steps is not None or train_tasks is not None
    known = known or is_placeholder(data.train_files)
    rounds = iterations(cfg, train_tasks or 0) if known else None
    updates = actor.ppo_mini_batches * actor.ppo_epochs
    engines = engine_count(cfg, facts.device)
    others = [extension.sampled_tokens(cfg, steps) for extension in EXTENSIONS.values()]
    # With append the response holds the whole play, and its bound is one for all turns together.
    turn = (
        min(data.max_response_length, env.max_steps * env.max_turn_tokens)
        if append
        else env.max_turn_tokens
    )
    run = f"{trainer.project_name}/{trainer.experiment_name}"
    what = "evaluation" if trainer.val_only else cfg.algorithm.adv_estimator
    what = "audit" if facts.audit else what
    return Plan(
        title=f"{run}: {what} on {env.env_name}",
        device=facts.device,
        run_dir=trainer.default_local_dir,
        checkpoints="none: nothing is trained" if facts.audit else kept_checkpoints(cfg),
        train_tasks=train_tasks,
        val_tasks=val_tasks,
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
        engines=engines,
        gpus_per_engine=rollout.tensor_model_parallel_size if facts.device == "cuda" else 1,
        engine_gpus=sum(engine_gpus(cfg)) if have_own_gpus(cfg, facts.device) else 0,
        weight_transfer=weight_transfer(cfg, facts.device),
        threads_per_engine=rollout.num_threads
        or max(1, facts.cores // engines_on_a_node(cfg, facts.device)),
        collectors=env.num_collectors,
        env_processes=env.num_collectors * env.num_workers,
        envs=env.num_collectors * env.num_workers * env.envs_per_worker,
        evaluates=trainer.val_only or bool(facts.audit),
        audit=facts.audit,
        panel_plays=rollout.val_kwargs.n,
        sampling=_sampling(cfg),
        policy=_source(cfg),
        parameters=facts.parameters,
        trained_parameters=facts.trained_parameters,
        lora_rank=cfg.actor_rollout_ref.model.lora_rank,
        made_by=facts.made_by,
        memory_gb=_ppo_memory(cfg, facts),
        machine_memory_gb=facts.memory_gb,
        device_memory_gb=_on_gpu(cfg, facts),
        gpu_problems=tuple(_gpu_problems(cfg, facts)),
        default_group_size=default_group_size(cfg),
        stand_in=stand_in_for(cfg),
        notes=tuple(notes(cfg, train_tasks)),
    )


def stand_in_for(cfg: PPOConfig | SFTConfig) -> str:
    """What is played in place of what ``cfg`` names; empty where it is what it says."""
    return "; ".join(filter(None, (extension.stand_in(cfg) for extension in EXTENSIONS.values())))


def _val_tasks(cfg: PPOConfig) -> int | None:
    """Tasks of the panel as far as the config tells; a limit alone does not."""
    declared = declared_tasks(cfg.env, "val")
    counts = [declared, cfg.env.val_tasks]
    return None if declared is None else min(count for count in counts if count is not None)


def _sampling(cfg: PPOConfig) -> str:
    sampled = cfg.actor_rollout_ref.rollout.val_kwargs
    if not sampled.do_sample or sampled.temperature == 0:
        return "greedy"
    return f"sampled at temperature {sampled.temperature:g}"


def _source(cfg: PPOConfig) -> str:
    trainer = cfg.trainer
    if trainer.resume_mode == "resume_path":
        return f"checkpoint {trainer.resume_from_path}"
    path = str(cfg.actor_rollout_ref.model.path)
    saved = Path(trainer.default_local_dir) / "checkpoints"
    resumes = trainer.resume_mode == "auto" and saved.is_dir()
    return f"{path}, or the newest checkpoint in {saved}" if resumes else path


def kept_checkpoints(cfg: PPOConfig | SFTConfig) -> str:
    """The checkpoints that a run leaves and their place, in words."""
    trainer = cfg.trainer
    place = f"{trainer.default_local_dir}/checkpoints"
    every = f"every {trainer.save_freq} steps and after the last one"
    if isinstance(cfg, SFTConfig):
        resumable = f"; to resume: the newest, {every}, in {place}" if trainer.save_freq > 0 else ""
        return f"the policy after the last step, in {cfg.model.save_path}{resumable}"
    if cfg.trainer.val_only:
        return "none (trainer.val_only=true)"
    if trainer.save_freq == 0:
        return "none (trainer.save_freq=0): the trained policy is not kept"
    if trainer.save_freq < 0:
        return f"after the last step alone (trainer.save_freq=-1), in {place}"
    kept = cfg.trainer.max_actor_ckpt_to_keep
    which = f"the newest {kept} are kept" if kept else "all are kept"
    return f"{every} (trainer.save_freq), {which}, in {place}"


def _ppo_memory(cfg: PPOConfig, facts: Facts) -> float | None:
    """Rough GiB per node; None where nothing can be said."""
    needed = cpu_node_bytes(cfg, facts.size)
    if facts.device != "cpu":
        needed = gpu_node_bytes(cfg, facts.size)
    return None if needed is None else needed / GIB


def _on_gpu(cfg: PPOConfig, facts: Facts) -> float | None:
    """GiB that an update needs on a GPU; None on CPU, and where the policy is not known."""
    needed = None if facts.device == "cpu" else update_bytes(cfg, facts.size)
    return None if needed is None else needed / GIB


def _gpu_problems(cfg: PPOConfig, facts: Facts) -> Iterator[str]:
    if facts.device == "cpu":
        return
    # The memory of this machine says nothing of the nodes of a cluster.
    joins = cfg.ray_init.address or os.environ.get("RAY_ADDRESS")
    host = None if joins else facts.memory_gb
    yield from memory_problems(cfg, facts.size, facts.device_memory_gb, host)


def _sft_plan(cfg: SFTConfig, facts: Facts) -> Plan:
    trainer = cfg.trainer
    data = cfg.data
    memory = None
    if facts.parameters is not None:
        logits = logit_bytes(data.max_token_len_per_gpu, facts.size)
        memory = (facts.parameters * TRAINING_BYTES + logits * trainer.n_gpus_per_node) / GIB
    run = f"{trainer.project_name}/{trainer.experiment_name}"
    return Plan(
        title=f"{run}: imitation of {data.episodes:,} episodes",
        device=facts.device,
        run_dir=trainer.default_local_dir,
        checkpoints=kept_checkpoints(cfg),
        epochs=trainer.total_epochs,
        optimizer_steps=1,
        iterations=trainer.total_training_steps,
        total_optimizer_steps=trainer.total_training_steps,
        row_tokens=data.max_length,
        ranks=trainer.n_gpus_per_node * trainer.nnodes,
        threads_per_rank=trainer.num_threads or max(1, facts.cores // trainer.n_gpus_per_node),
        parameters=facts.parameters,
        stand_in=stand_in_for(cfg) if not data.train_files else "",
        memory_gb=memory,
        machine_memory_gb=facts.memory_gb,
    )
