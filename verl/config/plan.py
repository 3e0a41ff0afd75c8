"""Plan of a run before its first step: tasks, rows, optimizer steps, workers, tokens and memory."""

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.config.cold_start import cold_start_config, cold_start_name
from verl.config.derive import (
    count_training_steps,
    declared_tasks,
    default_group_size,
    engine_count,
    engine_gpus_by_node,
    engines_have_separate_gpus,
    is_placeholder,
    known_tasks,
    max_engines_per_node,
    resolve_weight_transfer,
    trajectories_per_step,
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
from verl.config.plan_notes import iterate_plan_notes
from verl.config.plugins import METHODS, describe_stand_in
from verl.config.policy_size import count_new_parameters, read_policy_size
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings.cpus import available_cpus

TRANSFER_TEXTS = {
    "store": "through the object store",
    "ipc": "by CUDA IPC, from the GPUs that engines and training ranks share",
    "nccl": "by NCCL, from the first training rank to the GPUs of the engines",
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about machine, tasks and policy that the config does not state. None: not known yet."""

    cores: int = 1
    memory_gb: float | None = None
    device: str = "cpu"
    train_tasks: int | None = None
    val_tasks: int | None = None
    parameters: int | None = None
    trained_parameters: int | None = None  # number of parameters of the LoRA adapters
    made_by: str = ""  # config name of the cold start that trains the policy
    audit: str = ""  # number of tasks, turns and trajectories of main_audit, as text
    vocab_size: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    device_memory_gb: float | None = None  # GiB of one GPU

    @property
    def size(self) -> PolicySize:
        """Return the fields that describe the size of the policy."""
        names = [field.name for field in dataclasses.fields(PolicySize)]
        return PolicySize(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class Plan:
    """Numbers of tasks, rows, steps, workers and tokens of a run, and its memory.

    A value is None if it is not known before the tasks or the policy exist. Upper bounds have
    ``at_most`` in their name.
    """

    title: str
    device: str
    run_dir: str
    checkpoints: str = ""
    train_tasks: int | None = None
    val_tasks: int | None = None
    tasks_per_step: int = 0
    group_size: int = 0
    trajectories: int = 0
    turns_at_most: int = 0
    rows_at_most: int = 0
    mini_batches: int = 0
    epochs: int = 1
    optimizer_steps: int = 0
    training_steps: int | None = None
    total_optimizer_steps: int | None = None
    row_tokens: int = 0
    sampled_tokens_at_most: int = 0
    # Tokens of a step that are sampled in addition to the agent's turns: purpose -> upper bound.
    # Method plugins state them.
    other_tokens_at_most: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    threads_per_rank: int = 1
    engines: int = 0
    gpus_per_engine: int = 1
    engine_gpus: int = 0  # number of GPUs that only rollout engines use
    weight_transfer: str = "store"
    threads_per_engine: int = 1
    collectors: int = 0
    env_processes: int = 0
    envs: int = 0
    evaluates: bool = False  # no training: an evaluation on validation tasks, or main_audit
    audit: str = ""  # number of tasks, turns and trajectories of main_audit, as text
    trajectories_per_val_task: int = 1
    sampling: str = ""  # sampling parameters of validation
    policy: str | None = None  # path or checkpoint of the policy
    parameters: int | None = None
    trained_parameters: int | None = None
    lora_rank: int = 0
    made_by: str = ""
    memory_gb: float | None = None
    machine_memory_gb: float | None = None
    device_memory_gb: float | None = None  # GiB that an update needs on a GPU
    gpu_problems: tuple[str, ...] = ()  # messages: more memory is needed than GPU or host have
    default_group_size: int | None = None  # group size if env.rollout.n is not set
    stand_in: str = ""  # simulation that is used in place of the environment that the config names
    # Where this run differs from a verl-agent script with the same keys, with the overrides that
    # restore the behaviour of the script.
    notes: tuple[str, ...] = ()

    def labelled_lines(self) -> Iterator[tuple[str, str]]:
        """Yield label and value of each printed line."""
        ranks = _format_count(self.ranks, "training rank")
        threads = _format_count(self.threads_per_rank, "thread")
        yield "device", f"{self.device}, {ranks} x {threads}"
        yield from self._rollout_lines() if self.engines else ()
        if self.stand_in:
            yield "stand-in", f"{self.stand_in}: not comparable with published numbers"
        passes = _format_count(self.epochs, "epoch")
        if self.evaluates:
            yield from self._evaluation_lines()
        elif self.engines:
            batches = _format_count(self.mini_batches, "mini-batch", "es")
            steps = _format_count(self.optimizer_steps, "optimizer step")
            in_all = f"{_format_optional(self.total_optimizer_steps)} optimizer steps"
            yield "updates", f"{batches} x {passes} = {steps} per training step"
            yield "in all", f"{_format_optional(self.training_steps)} training steps, {in_all}"
            yield from (("note", note) for note in self.notes)
        else:
            yield (
                "updates",
                f"{passes}, {_format_optional(self.total_optimizer_steps)} optimizer steps",
            )
        yield "policy", self._describe_policy()
        yield (
            "memory",
            _format_memory(self.memory_gb, self.machine_memory_gb, self.device_memory_gb),
        )
        yield "run directory", self.run_dir
        yield "checkpoints", self.checkpoints

    def _describe_policy(self) -> str:
        text = f"{_format_optional(self.parameters)} parameters"
        if self.made_by:
            text += f", trained first by a cold start ({self.made_by})"
        if self.lora_rank:
            trained = _format_optional(self.trained_parameters)
            text += f"; LoRA of rank {self.lora_rank}: {trained} parameters are trained"
        return f"{text}; {self.policy}" if self.evaluates else text

    def _evaluation_lines(self) -> Iterator[tuple[str, str]]:
        tasks = f"{_format_optional(self.val_tasks)} tasks x {self.trajectories_per_val_task:,}"
        trajectories = (
            None if self.val_tasks is None else self.val_tasks * self.trajectories_per_val_task
        )
        evaluation = f"{tasks} = {_format_optional(trajectories)} trajectories, {self.sampling}"
        yield ("audit", self.audit) if self.audit else ("evaluation", evaluation)
        yield "updates", "none: no training"

    def _rollout_lines(self) -> Iterator[tuple[str, str]]:
        threads = _format_count(self.threads_per_engine, "thread")
        engines = f"{_format_count(self.engines, 'engine')} x {threads}"
        if self.gpus_per_engine > 1:
            engines += f" on {self.gpus_per_engine} GPUs each"
        if self.engine_gpus:
            engines += f" ({_format_count(self.engine_gpus, 'GPU')} only for engines)"
        processes = _format_count(self.env_processes, "environment process", "es")
        envs = _format_count(self.envs, "environment")
        collectors = _format_count(self.collectors, "collector")
        yield "rollout", f"{engines}, {collectors}, {processes} ({envs} at once)"
        if self.device != "cpu":
            yield "weights", f"to the engines {TRANSFER_TEXTS[self.weight_transfer]}"
        if self.evaluates:
            return
        train_tasks, val_tasks = map(_format_optional, (self.train_tasks, self.val_tasks))
        yield "tasks", f"{train_tasks} to train on, {val_tasks} to validate on"
        default = f" (env.rollout.n; default: {self.default_group_size})"
        note = default if self.default_group_size else ""
        tasks = f"{_format_count(self.tasks_per_step, 'task')} x {self.group_size}{note}"
        trajectories = _format_count(self.trajectories, "trajectory", plural="trajectories")
        yield "one step", f"{tasks} = {trajectories}, {self.turns_at_most:,} turns at most"
        yield "rows", f"{self.rows_at_most:,} at most, {self.row_tokens:,} tokens each at most"
        other_counts = [
            f" + {count:,} of {purpose}" for purpose, count in self.other_tokens_at_most.items()
        ]
        yield "sampled tokens", f"{self.sampled_tokens_at_most:,} at most{''.join(other_counts)}"

    def format_text(self) -> str:
        """Return the plan as text: the title, and a line for each of ``labelled_lines``."""
        rows = list(self.labelled_lines())
        width = max(len(label) for label, _ in rows)
        return "\n".join([self.title, *(f"  {label:<{width}}  {value}" for label, value in rows)])

    def build_table(self) -> Any:
        """Return the plan as a ``rich.table.Table``."""
        from rich.table import Table

        table = Table(title=self.title, show_header=False, title_justify="left")
        for label, value in self.labelled_lines():
            table.add_row(label, value)
        return table

    def resource_problems(self) -> list[str]:
        """Return a message for each estimate that exceeds the memory of the host or of a GPU."""
        needed_gb = self.memory_gb
        available = self.machine_memory_gb
        if self.device != "cpu":
            return list(self.gpu_problems)
        if needed_gb is None or available is None or needed_gb <= available:
            return []
        fix = (
            "fewer tokens or rows per micro-batch, fewer engines, "
            "a smaller actor_rollout_ref.rollout.kv_cache_gb"
        )
        return [f"plan: needs {_format_memory(needed_gb, available)}; fix: {fix}"]


def _format_count(number: int, noun: str, suffix: str = "s", plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + suffix}"


def _format_optional(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _format_memory(
    needed: float | None, available: float | None, on_gpu: float | None = None
) -> str:
    suffix = "for weights, optimizer, engines and logits" if on_gpu is None else "of host memory"
    text = "?" if needed is None else f"about {needed:.1f} GiB per node {suffix}"
    if on_gpu is not None:
        text = f"about {on_gpu:.1f} GiB per GPU for an update; {text}"
    return text if available is None else f"{text}; this machine has {available:.1f} GiB"


def gather_facts(cfg: PPOConfig | SFTConfig) -> Facts:
    """Return facts that are found without torch: CPU cores, memory, size of a policy on disk."""
    pages = (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    )
    size = PolicySize()
    # If a file is damaged or a cold start cannot be composed, the size is not known. Other checks
    # report these errors.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        size = _find_policy_size(cfg)
    device = guess_device(cfg.trainer.device)
    return Facts(
        cores=available_cpus(),
        memory_gb=pages / GIB if pages else None,
        device=device,
        device_memory_gb=_gpu_memory_gb() if device == "cuda" else None,
        made_by=cold_start_name(cfg)
        if isinstance(cfg, PPOConfig) and _needs_cold_start(cfg)
        else "",
        **dataclasses.asdict(size),
    )


def _find_policy_size(cfg: PPOConfig | SFTConfig) -> PolicySize:
    """Return the size of the existing policy, or of the one that a cold start will train."""
    if isinstance(cfg, PPOConfig) and _needs_cold_start(cfg):
        cfg = cold_start_config(cfg)
    path = cfg.actor_rollout_ref.model.path if isinstance(cfg, PPOConfig) else cfg.model.path
    if path is None and isinstance(cfg, SFTConfig):
        vocab = cfg.model.vocab_size
        return PolicySize(count_new_parameters(cfg.model.new, vocab), vocab)
    return read_policy_size(Path(path)) if path else PolicySize()


def _needs_cold_start(cfg: PPOConfig) -> bool:
    path = cfg.actor_rollout_ref.model.path
    return cfg.cold_start.enable and path is not None and not Path(path).exists()


def _gpu_memory_gb() -> float | None:
    """Return the GiB of the smallest GPU of this machine by ``nvidia-smi``, or None."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return min(int(line) for line in run.stdout.split()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def make_plan(cfg: PPOConfig | SFTConfig, facts: Facts | Mapping[str, Any] | None = None) -> Plan:
    """Return the plan of a run with ``cfg``, a derived ``PPOConfig`` or ``SFTConfig``.

    ``facts`` default to ``gather_facts(cfg)``.
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
    uses_append_history = env.history == "append"
    trajectories = trajectories_per_step(cfg)
    turns = trajectories * env.max_steps
    train_tasks = facts.train_tasks if facts.train_tasks is not None else known_tasks(cfg.env)
    steps = _training_steps(cfg, train_tasks)
    updates = actor.ppo_mini_batches * actor.ppo_epochs
    run = f"{trainer.project_name}/{trainer.experiment_name}"
    run_purpose = "evaluation" if trainer.val_only else cfg.algorithm.adv_estimator
    run_purpose = "audit" if facts.audit else run_purpose
    return Plan(
        title=f"{run}: {run_purpose} on {env.env_name}",
        device=facts.device,
        run_dir=trainer.default_local_dir,
        checkpoints="none: no training" if facts.audit else describe_checkpoints(cfg),
        train_tasks=train_tasks,
        val_tasks=facts.val_tasks if facts.val_tasks is not None else _val_tasks(cfg),
        tasks_per_step=data.train_batch_size,
        group_size=env.rollout.n,
        trajectories=trajectories,
        turns_at_most=turns,
        rows_at_most=trajectories if uses_append_history else turns,
        mini_batches=actor.ppo_mini_batches,
        epochs=actor.ppo_epochs,
        optimizer_steps=updates,
        training_steps=steps,
        total_optimizer_steps=None if steps is None else steps * updates,
        row_tokens=data.max_prompt_length + data.max_response_length,
        **_sampled_tokens(cfg, trajectories, turns),
        **_worker_counts(cfg, facts),
        evaluates=trainer.val_only or bool(facts.audit),
        audit=facts.audit,
        trajectories_per_val_task=rollout.val_kwargs.n,
        sampling=_describe_sampling(cfg),
        policy=_policy_source(cfg),
        parameters=facts.parameters,
        trained_parameters=facts.trained_parameters,
        lora_rank=cfg.actor_rollout_ref.model.lora_rank,
        made_by=facts.made_by,
        memory_gb=_node_memory_gb(cfg, facts),
        machine_memory_gb=facts.memory_gb,
        device_memory_gb=_update_memory_gb(cfg, facts),
        gpu_problems=tuple(_gpu_problems(cfg, facts)),
        default_group_size=default_group_size(cfg),
        stand_in=describe_stand_in(cfg),
        notes=tuple(iterate_plan_notes(cfg, train_tasks)),
    )


def _training_steps(cfg: PPOConfig, train_tasks: int | None) -> int | None:
    """Return the number of training steps; None if it depends on an unknown number of tasks."""
    is_known = cfg.trainer.total_training_steps is not None or train_tasks is not None
    is_known = is_known or is_placeholder(cfg.data.train_files)
    return count_training_steps(cfg, train_tasks or 0) if is_known else None


def _sampled_tokens(cfg: PPOConfig, trajectories: int, turns: int) -> dict[str, Any]:
    """Return upper bounds of the tokens sampled in a training step, as fields of ``Plan``.

    They are for the agent's turns, and for other purposes of the method plugins.
    """
    env = cfg.env
    counts_by_plugin = [plugin.sampled_tokens(cfg, turns) for plugin in METHODS]
    if env.history == "append":
        # The response contains the whole trajectory, so its bound applies to all turns together.
        episode_tokens = min(cfg.data.max_response_length, env.max_steps * env.max_turn_tokens)
        tokens = trajectories * episode_tokens
    else:
        tokens = turns * env.max_turn_tokens
    return {
        "sampled_tokens_at_most": tokens,
        "other_tokens_at_most": {
            purpose: count for counts in counts_by_plugin for purpose, count in counts.items()
        },
    }


def _worker_counts(cfg: PPOConfig, facts: Facts) -> dict[str, Any]:
    """Return ranks, engines, collectors and environments of a run, and their threads."""
    env = cfg.env
    rollout = cfg.actor_rollout_ref.rollout
    trainer = cfg.trainer
    engines_per_node = max_engines_per_node(cfg, facts.device)
    processes = env.num_collectors * env.num_workers
    return {
        "ranks": trainer.n_gpus_per_node * trainer.nnodes,
        "threads_per_rank": trainer.num_threads or max(1, facts.cores // trainer.n_gpus_per_node),
        "engines": engine_count(cfg, facts.device),
        "gpus_per_engine": rollout.tensor_model_parallel_size if facts.device == "cuda" else 1,
        "engine_gpus": sum(engine_gpus_by_node(cfg))
        if engines_have_separate_gpus(cfg, facts.device)
        else 0,
        "weight_transfer": resolve_weight_transfer(cfg, facts.device),
        "threads_per_engine": rollout.num_threads or max(1, facts.cores // engines_per_node),
        "collectors": env.num_collectors,
        "env_processes": processes,
        "envs": processes * env.envs_per_worker,
    }


def _val_tasks(cfg: PPOConfig) -> int | None:
    """Return the number of validation tasks if the environment's section states it, or None."""
    declared = declared_tasks(cfg.env, "val")
    counts = [declared, cfg.env.val_tasks]
    return None if declared is None else min(count for count in counts if count is not None)


def _describe_sampling(cfg: PPOConfig) -> str:
    sampled = cfg.actor_rollout_ref.rollout.val_kwargs
    if not sampled.do_sample or sampled.temperature == 0:
        return "greedy"
    return f"sampled at temperature {sampled.temperature:g}"


def _policy_source(cfg: PPOConfig) -> str:
    trainer = cfg.trainer
    if trainer.resume_mode == "resume_path":
        return f"checkpoint {trainer.resume_from_path}"
    path = str(cfg.actor_rollout_ref.model.path)
    saved = Path(trainer.default_local_dir) / "checkpoints"
    resumes = trainer.resume_mode == "auto" and saved.is_dir()
    return f"{path}, or the newest checkpoint in {saved}" if resumes else path


def describe_checkpoints(cfg: PPOConfig | SFTConfig) -> str:
    """Describe the checkpoints of a run and their directory."""
    trainer = cfg.trainer
    folder = f"{trainer.default_local_dir}/checkpoints"
    every = f"every {trainer.save_freq} steps and after the last one"
    if isinstance(cfg, SFTConfig):
        resumable = (
            f"; to resume: the newest, {every}, in {folder}" if trainer.save_freq > 0 else ""
        )
        return f"the policy after the last step, in {cfg.model.save_path}{resumable}"
    if cfg.trainer.val_only:
        return "none (trainer.val_only=true)"
    if trainer.save_freq == 0:
        return "none (trainer.save_freq=0): the trained policy is not kept"
    if trainer.save_freq < 0:
        return f"only after the last step (trainer.save_freq=-1), in {folder}"
    max_checkpoints = cfg.trainer.max_actor_ckpt_to_keep
    which = f"the newest {max_checkpoints} are kept" if max_checkpoints else "all are kept"
    return f"{every} (trainer.save_freq), {which}, in {folder}"


def _node_memory_gb(cfg: PPOConfig, facts: Facts) -> float | None:
    """Return the estimated GiB per node; None if the size of the policy is not known."""
    needed_bytes = cpu_node_bytes(cfg, facts.size)
    if facts.device != "cpu":
        needed_bytes = gpu_node_bytes(cfg, facts.size)
    return None if needed_bytes is None else needed_bytes / GIB


def _update_memory_gb(cfg: PPOConfig, facts: Facts) -> float | None:
    """Return the GiB that an update needs on a GPU; None on CPU or for an unknown policy."""
    needed_bytes = None if facts.device == "cpu" else update_bytes(cfg, facts.size)
    return None if needed_bytes is None else needed_bytes / GIB


def _gpu_problems(cfg: PPOConfig, facts: Facts) -> Iterator[str]:
    if facts.device == "cpu":
        return
    # The nodes of a Ray cluster that the run joins may have more or less memory than this machine.
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
        checkpoints=describe_checkpoints(cfg),
        epochs=trainer.total_epochs,
        optimizer_steps=1,
        training_steps=trainer.total_training_steps,
        total_optimizer_steps=trainer.total_training_steps,
        row_tokens=data.max_length,
        ranks=trainer.n_gpus_per_node * trainer.nnodes,
        threads_per_rank=trainer.num_threads or max(1, facts.cores // trainer.n_gpus_per_node),
        parameters=facts.parameters,
        stand_in=describe_stand_in(cfg) if not data.train_files else "",
        memory_gb=memory,
        machine_memory_gb=facts.memory_gb,
    )
