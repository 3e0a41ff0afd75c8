"""Plan of a run before its first step: tasks, rows, optimizer steps, workers, tokens and memory."""

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.config import derive, memory
from verl.config.adapter_files import find_resumed_adapter
from verl.config.checkpoint_paths import find_checkpoint_to_resume, get_step_of_checkpoint
from verl.config.cold_start import build_cold_start_config, get_cold_start_config_name
from verl.config.load import guess_device
from verl.config.memory import GIB, PolicySize
from verl.config.plan_notes import iterate_plan_notes
from verl.config.plugins import METHOD_PLUGINS, describe_stand_in
from verl.config.problems import build_conflict
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import Problem
from verl.config.settings.cpus import available_cpus
from verl.names import MAX_PADDING, MAX_TREE_SHARE, History, LoraSync

MAX_NAMED_FILES = 3  # training files of a supervised run that its plan names
TRANSFER_TEXTS = {
    "store": "through the object store",
    "ipc": "by CUDA IPC, from the GPUs that engines and training ranks share",
    "nccl": "by NCCL, from the first training rank to the GPUs of the engines",
}

# Text of the plan about prompts and rows, by the value of ``env.history``.
HISTORY_TEXTS: dict[History, str] = {
    "append": "a prompt is all earlier tokens, a trajectory one row",
    "window": "each turn is one row with a new prompt",
    "chat": "a prompt is the chat template over all messages, with a new row where it changes",
}

# Text of the plan about tokens that several rows share, by the value of ``env.history``.
SHARED_PREFIXES: dict[History, str] = {
    "append": "rows of a group share the first prompt",
    "window": "rows of a group share the first turns, and other rows the head of the prompt",
    "chat": "rows of a group share the first prompt, and those of a trajectory earlier turns",
}


@dataclasses.dataclass(frozen=True)
class PlanFacts(PolicySize):
    """Facts about machine, tasks and policy that the config does not state; None if unknown."""

    cores: int = 1  # CPU cores of this machine
    memory_gb: float | None = None  # host memory of this machine, GiB
    device: str = "cpu"  # cpu or cuda
    train_tasks: int | None = None
    val_tasks: int | None = None
    trained_parameters: int | None = None  # number of parameters of the LoRA adapters
    lora_sync: LoraSync | None = None  # what a weight sync sends with LoRA: adapter or merged
    merged_reason: str = ""  # why a weight sync with LoRA sends merged weights
    cold_start_config_name: str = ""  # config of the supervised training (cold start) of the policy
    audit_text: str = ""  # numbers of tasks, turns and trajectories that main_audit uses, as text
    device_memory_gb: float | None = None  # GiB of one GPU
    engine_note: str = ""  # what makes the rollout engine slow with this policy
    history_note: str = ""  # what the chat template of the policy does with earlier turns
    row_wise_reason: str | None = None  # why rows of the policy cannot be packed; "" if they can
    max_packed_tokens: int | None = None  # length of the longest row that can be packed


class Plan:
    """Numbers of a run that are known before its first step, and the estimate of its memory.

    A value is None if it is not known before the tasks or the policy exist.
    """

    title: str
    training_steps: int | None
    total_optimizer_steps: int | None
    memory_gb: float | None  # GiB of a node
    device_memory_gb: float | None = None  # GiB that an update needs on a GPU

    def __init__(self, cfg: PPOConfig | SFTConfig, facts: PlanFacts) -> None:
        trainer = cfg.trainer
        self.facts = facts
        self.run_name = f"{trainer.project_name}/{trainer.experiment_name}"
        self.run_dir = trainer.default_local_dir
        self.resumed_checkpoint = find_checkpoint_to_resume(trainer)
        self.ranks = trainer.n_gpus_per_node * trainer.nnodes
        cores_per_rank = facts.cores // trainer.n_gpus_per_node
        self.threads_per_rank = trainer.num_threads or max(1, cores_per_rank)

    def iterate_labelled_lines(self) -> Iterator[tuple[str, str]]:
        """Yield label and value of each line of the printed plan."""
        ranks_text = _format_count(self.ranks, "training rank")
        threads_text = _format_count(self.threads_per_rank, "thread")
        yield "device", f"{self.facts.device}, {ranks_text} x {threads_text}"
        yield from self._iterate_workload_lines()
        available_gb = self.facts.memory_gb
        yield "memory", _format_memory(self.memory_gb, available_gb, self.device_memory_gb)
        yield "run directory", self._describe_run_directory()
        yield "checkpoints", self._describe_checkpoints()

    def _iterate_workload_lines(self) -> Iterator[tuple[str, str]]:
        raise NotImplementedError

    def _describe_forward_passes(
        self, max_row_tokens: int, kernel_name: str, branch_cost: str = ""
    ) -> str:
        max_tokens = self.facts.max_packed_tokens
        check_text = "log-probs are compared at load"
        cost_text = f"cost: up to {MAX_PADDING:.0%} padding{branch_cost}"
        if self.facts.row_wise_reason:
            return f"row by row ({self.facts.row_wise_reason}; {check_text}); {cost_text}"
        length_text = "" if max_tokens is None else f" up to {max_tokens:,} tokens"
        text = f"packed (plain causal attention{length_text}; kernels: {kernel_name}; {check_text})"
        if max_tokens is None or max_tokens >= max_row_tokens:
            return text
        return f"{text}; row by row with rows longer than {max_tokens:,} tokens; {cost_text}"

    def _describe_checkpoints(self) -> str:
        raise NotImplementedError

    def _describe_run_directory(self) -> str:
        checkpoint = self.resumed_checkpoint
        if checkpoint is None:
            return self.run_dir
        text = f"{self.run_dir}; the run continues from {checkpoint}"
        last_step = self.training_steps
        is_finished = last_step is not None and get_step_of_checkpoint(checkpoint) >= last_step
        return f"{text}: nothing is left to train" if is_finished else text

    def _find_device_problems(self) -> list[Problem]:
        return []

    def format_text(self) -> str:
        """Return title and lines of the plan as text."""
        lines = list(self.iterate_labelled_lines())
        width = max(len(label) for label, _ in lines)
        return "\n".join([self.title, *(f"  {label:<{width}}  {value}" for label, value in lines)])

    def build_table(self) -> Any:
        """Return the plan as a ``rich.table.Table``."""
        from rich.table import Table
        from rich.text import Text

        # Text objects: rich would read square brackets of paths as markup.
        table = Table(
            title=Text(self.title, "table.title"), show_header=False, title_justify="left"
        )
        for label, value in self.iterate_labelled_lines():
            table.add_row(label, Text(value))
        return table

    def find_problems(self) -> list[Problem]:
        """Return a message for each number of the plan with which the run cannot succeed."""
        if self.facts.device != "cpu":
            return self._find_device_problems()
        needed_gb = self.memory_gb
        available_gb = self.facts.memory_gb
        if needed_gb is None or available_gb is None or needed_gb <= available_gb:
            return []
        message = (
            f"plan: needs {_format_memory(needed_gb, available_gb)}; fix: fewer tokens or rows per "
            "micro-batch, fewer engines, a smaller actor_rollout_ref.rollout.kv_cache_gb"
        )
        return [Problem(message, "does_not_fit")]


class PPOPlan(Plan):
    """Plan of a training run, of an evaluation (``trainer.val_only``) or of an audit."""

    def __init__(self, cfg: PPOConfig, facts: PlanFacts) -> None:
        super().__init__(cfg, facts)
        self.cfg = cfg
        env = cfg.env
        actor = cfg.actor_rollout_ref.actor
        self.is_evaluation = cfg.trainer.val_only or bool(facts.audit_text)
        if self.is_evaluation:
            self.resumed_checkpoint = None  # the line "policy" of the plan names it
        run_kind = "evaluation" if cfg.trainer.val_only else cfg.algorithm.adv_estimator
        self.title = (
            f"{self.run_name}: {'audit' if facts.audit_text else run_kind} on {env.env_name}"
        )
        self.train_tasks = facts.train_tasks
        if facts.train_tasks is None:
            self.train_tasks = derive.count_known_train_tasks(env)
        self.val_tasks = _count_val_tasks(cfg) if facts.val_tasks is None else facts.val_tasks
        self.trajectories = derive.count_trajectories_per_step(cfg)
        self.max_turns = self.trajectories * env.max_steps
        self.max_rows = derive.compute_max_rows(cfg)
        self.max_extra_tokens_by_purpose = self._count_extra_tokens_by_purpose()
        self.mini_batches = actor.ppo_mini_batches
        self.optimizer_steps = self.mini_batches * actor.ppo_epochs
        steps = self.training_steps = self._count_training_steps()
        # The policy is not updated in the training steps of critic_warmup.
        updates = None if steps is None else max(0, steps - cfg.trainer.critic_warmup)
        self.total_optimizer_steps = None if updates is None else updates * self.optimizer_steps
        rollout = cfg.actor_rollout_ref.rollout
        engines_per_node = derive.count_max_engines_per_node(cfg, facts.device)
        self.threads_per_engine = rollout.num_threads or max(1, facts.cores // engines_per_node)
        self.env_processes = env.num_collectors * env.num_workers
        self.envs = self.env_processes * env.envs_per_worker
        self.sends_adapter = facts.lora_sync == "adapter"
        if facts.device == "cpu":
            self.memory_gb = _bytes_to_gib(memory.estimate_cpu_node_bytes(cfg, facts))
        else:
            node_bytes = memory.estimate_gpu_node_bytes(cfg, facts, self.sends_adapter)
            self.memory_gb = _bytes_to_gib(node_bytes)
            self.device_memory_gb = _bytes_to_gib(memory.estimate_update_bytes(cfg, facts))

    def _count_training_steps(self) -> int | None:
        cfg = self.cfg
        is_known = self.train_tasks is not None or cfg.trainer.total_training_steps is not None
        if is_known or derive.are_placeholder_files(cfg.data.train_files):
            return derive.count_training_steps(cfg, self.train_tasks or 0)
        return None

    def find_problems(self) -> list[Problem]:
        warmup_steps = self.cfg.trainer.critic_warmup
        if self.is_evaluation or not warmup_steps or self.total_optimizer_steps != 0:
            return super().find_problems()
        key = "trainer.critic_warmup"
        why = f"the policy would not be updated in the {self.training_steps} steps of the run"
        allowed = f"less than {self.training_steps}"
        fix = f"{key}=0, or a larger trainer.total_training_steps"
        problem = build_conflict(self.cfg, key, why, allowed, fix)
        return [problem, *super().find_problems()]

    def _count_extra_tokens_by_purpose(self) -> dict[str, int]:
        token_counts: dict[str, int] = {}
        for plugin in METHOD_PLUGINS:
            token_counts |= plugin.sampled_tokens(self.cfg, self.max_turns)
        return token_counts

    def _iterate_workload_lines(self) -> Iterator[tuple[str, str]]:
        yield from self._iterate_rollout_lines()
        if not self.is_evaluation:
            yield from self._iterate_step_lines()
        stand_in_text = describe_stand_in(self.cfg)
        if stand_in_text:
            yield "stand-in", f"{stand_in_text}: not comparable with published numbers"
        yield from (
            self._iterate_evaluation_lines() if self.is_evaluation else self._iterate_update_lines()
        )
        yield "policy", self._describe_policy()

    def _iterate_rollout_lines(self) -> Iterator[tuple[str, str]]:
        cfg = self.cfg
        device = self.facts.device
        threads_text = _format_count(self.threads_per_engine, "thread")
        engines_text = (
            f"{_format_count(derive.count_engines(cfg, device), 'engine')} x {threads_text}"
        )
        gpus_per_engine = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
        if gpus_per_engine > 1 and device == "cuda":
            engines_text += f" on {gpus_per_engine} GPUs each"
        if derive.engines_have_separate_gpus(cfg, device):
            engine_gpus = sum(derive.count_engine_gpus_by_node(cfg))
            engines_text += f" ({_format_count(engine_gpus, 'GPU')} only for engines)"
        processes_text = _format_count(
            self.env_processes, "environment process", "environment processes"
        )
        environments_text = _format_count(self.envs, "environment")
        collectors_text = _format_count(cfg.env.num_collectors, "collector")
        yield (
            "rollout",
            f"{engines_text}, {collectors_text}, {processes_text} ({environments_text} at once)"
            f"{_format_note(self.facts.engine_note)}",
        )
        note = _format_note(self.facts.history_note)
        if cfg.env.compact.enable:
            limit = cfg.env.compact.max_summary_tokens
            note += f"; a full row ends with a summary of at most {limit} tokens for the next row"
        default_history = type(cfg.env).model_fields["history"].default
        source = "the default of env.history"
        if cfg.env.history != default_history:
            source = f"set by env.history; default: {default_history}"
        yield "history", f"{cfg.env.history} ({source}): {HISTORY_TEXTS[cfg.env.history]}{note}"
        if self.facts.lora_sync:
            yield "LoRA", self._describe_lora()
        if device != "cpu":
            transfer_text = TRANSFER_TEXTS[derive.resolve_weight_transfer(cfg, device)]
            yield "weights", f"to the engines {transfer_text}"

    def _describe_lora(self) -> str:
        facts = self.facts
        text = "a weight sync sends only the adapter, after the base weights once"
        if facts.lora_sync == "merged":
            text = (
                f"a weight sync sends all weights, with the adapter merged: {facts.merged_reason}"
            )
        if memory.has_reference(self.cfg):
            text += "; the reference policy is the base model, without an adapter"
        return text

    def _iterate_step_lines(self) -> Iterator[tuple[str, str]]:
        cfg = self.cfg
        train_tasks, val_tasks = map(_format_optional, (self.train_tasks, self.val_tasks))
        yield "tasks", f"{train_tasks} to train on, {val_tasks} to validate on"
        default_group_size = derive.choose_default_group_size(cfg)
        group_text = f"{cfg.env.rollout.n} (env.rollout.n; default: {default_group_size})"
        tasks_text = f"{_format_count(cfg.data.train_batch_size, 'task')} x {group_text}"
        trajectories_text = _format_count(self.trajectories, "trajectory", "trajectories")
        yield (
            "one step",
            f"{tasks_text} = {trajectories_text}, {self.max_turns:,} turns at most",
        )
        row_tokens = cfg.data.max_row_tokens
        yield "rows", f"{self.max_rows:,} at most, {row_tokens:,} tokens each at most"
        max_tokens = self.max_turns * cfg.env.max_turn_tokens
        if cfg.env.compact.enable:
            num_summaries = self.max_turns - self.trajectories
            max_tokens += num_summaries * cfg.env.compact.max_summary_tokens
        elif cfg.env.history == "append":
            # A response contains all turns of a trajectory, so max_response_length limits the sum.
            max_tokens = min(max_tokens, self.trajectories * cfg.data.max_response_length)
        extra_texts = [
            f" + {count:,} of {purpose}"
            for purpose, count in self.max_extra_tokens_by_purpose.items()
        ]
        yield "sampled tokens", f"{max_tokens:,} at most{''.join(extra_texts)}"

    def _iterate_update_lines(self) -> Iterator[tuple[str, str]]:
        mini_batches_text = _format_count(self.mini_batches, "mini-batch", "mini-batches")
        epochs_text = _format_count(self.cfg.actor_rollout_ref.actor.ppo_epochs, "epoch")
        steps_text = _format_count(self.optimizer_steps, "optimizer step")
        yield "updates", f"{mini_batches_text} x {epochs_text} = {steps_text} per training step"
        training_steps = _format_optional(self.training_steps)
        optimizer_steps = _format_optional(self.total_optimizer_steps)
        yield "in all", f"{training_steps} training steps, {optimizer_steps} optimizer steps"
        # The notes name differences from a verl-agent script with the same keys.
        yield from (("note", note) for note in iterate_plan_notes(self.cfg, self.train_tasks))
        yield from self._iterate_forward_pass_lines()

    def _iterate_forward_pass_lines(self) -> Iterator[tuple[str, str]]:
        if self.facts.row_wise_reason is None:  # the model is not known
            return
        cfg = self.cfg
        branch_cost = ""
        if self.max_extra_tokens_by_purpose:
            # An alternative thought starts on average in the middle of its row.
            tokens = cfg.data.max_row_tokens // 2
            branch_cost = f", and about {tokens:,} tokens of its row again for each alternative"
        max_row_tokens = cfg.actor_rollout_ref.rollout.max_model_len
        kernel_name = cfg.actor_rollout_ref.model.attn_implementation
        yield (
            "forward passes",
            self._describe_forward_passes(max_row_tokens, kernel_name, branch_cost),
        )
        yield "prefix tree", self._describe_prefix_tree()

    def _describe_prefix_tree(self) -> str:
        prefix_tree = self.cfg.actor_rollout_ref.model.prefix_tree
        setting_text = f"actor_rollout_ref.model.prefix_tree={str(prefix_tree).lower()}"
        if not prefix_tree:
            return f"off ({setting_text})"
        if self.facts.row_wise_reason:
            return "off: rows are computed row by row"
        saving = "" if prefix_tree is True else f" if that saves {1 - MAX_TREE_SHARE:.0%} of them"
        reason = SHARED_PREFIXES[self.cfg.env.history]
        return f"tokens that rows share are computed once{saving} ({setting_text}): {reason}"

    def _iterate_evaluation_lines(self) -> Iterator[tuple[str, str]]:
        val_sampling = self.cfg.actor_rollout_ref.rollout.val_kwargs
        trajectories_per_task = val_sampling.n
        tasks_text = f"{_format_optional(self.val_tasks)} tasks x {trajectories_per_task:,}"
        trajectories = None if self.val_tasks is None else self.val_tasks * trajectories_per_task
        greedy_key = derive.find_greedy_override(val_sampling)
        sampling = (
            "greedy" if greedy_key else f"sampled at temperature {val_sampling.temperature:g}"
        )
        evaluation_text = (
            f"{tasks_text} = {_format_optional(trajectories)} trajectories, {sampling}"
        )
        audit = self.facts.audit_text
        yield ("audit", audit) if audit else ("evaluation", evaluation_text)
        yield "updates", "none: no training"

    def _describe_policy(self) -> str:
        facts = self.facts
        text = f"{_format_optional(facts.parameters)} parameters"
        if facts.cold_start_config_name:
            text += f", trained first by a cold start ({facts.cold_start_config_name})"
        model = self.cfg.actor_rollout_ref.model
        if model.lora_rank:
            num_trained = _format_optional(facts.trained_parameters)
            text += f"; LoRA of rank {model.lora_rank}: {num_trained} parameters are trained"
            # For an evaluation, the return statement adds the checkpoint to the text.
            resumed = None if self.is_evaluation else find_resumed_adapter(self.cfg.trainer)
            origin = resumed[0] if resumed else model.lora_adapter_path
            text += f", from {origin}" if origin else ""
        return f"{text}; {_describe_policy_source(self.cfg)}" if self.is_evaluation else text

    def _describe_checkpoints(self) -> str:
        trainer = self.cfg.trainer
        checkpoint_directory = f"{trainer.default_local_dir}/checkpoints"
        if self.facts.audit_text:
            return "none: no training"
        if trainer.val_only:
            return "none (trainer.val_only=true)"
        if trainer.save_freq == 0:
            return "none (trainer.save_freq=0): the trained policy is not kept"
        if trainer.save_freq < 0:
            return f"only after the last step (trainer.save_freq=-1), in {checkpoint_directory}"
        num_kept = trainer.max_actor_ckpt_to_keep
        kept_text = f"the newest {num_kept} are kept" if num_kept else "all are kept"
        interval = f"every {trainer.save_freq} steps and after the last one (trainer.save_freq)"
        return f"{interval}, {kept_text}, in {checkpoint_directory}"

    def _find_device_problems(self) -> list[Problem]:
        # If the run joins a Ray cluster, the memory of its nodes may differ from this machine's.
        host_gb = None if self.cfg.ray_init.cluster_address else self.facts.memory_gb
        device_gb = self.facts.device_memory_gb
        problems = memory.find_memory_problems(
            self.cfg, self.facts, device_gb, host_gb, self.sends_adapter
        )
        return list(problems)


class SFTPlan(Plan):
    """Plan of a supervised run, which has neither engines nor environments."""

    def __init__(self, cfg: SFTConfig, facts: PlanFacts) -> None:
        super().__init__(cfg, facts)
        self.cfg = cfg
        self.title = f"{self.run_name}: imitation of {_describe_sft_data(cfg)}"
        self.training_steps = self.total_optimizer_steps = cfg.trainer.total_training_steps
        self.memory_gb = None
        if facts.parameters is not None:
            logit_bytes = memory.estimate_logit_bytes(cfg.data.max_token_len_per_gpu, facts)
            bytes_per_parameter = memory.TRAINING_BYTES_PER_PARAMETER
            if cfg.model.lora_rank:
                bytes_per_parameter = memory.WEIGHT_BYTES_PER_PARAMETER
            weight_bytes = facts.parameters * bytes_per_parameter
            needed_bytes = weight_bytes + logit_bytes * cfg.trainer.n_gpus_per_node
            self.memory_gb = needed_bytes / GIB

    def _iterate_workload_lines(self) -> Iterator[tuple[str, str]]:
        stand_in_text = describe_stand_in(self.cfg) if not self.cfg.data.train_files else ""
        if stand_in_text:
            yield "stand-in", f"{stand_in_text}: not comparable with published numbers"
        epochs_text = _format_count(self.cfg.trainer.total_epochs, "epoch")
        steps = _format_optional(self.total_optimizer_steps)
        yield "updates", f"{epochs_text}, {steps} optimizer steps"
        if self.facts.row_wise_reason is not None:
            text = self._describe_forward_passes(self.cfg.data.max_length, "sdpa")
            yield "forward passes", text
            yield "prefix tree", "off: each row of a supervised run is computed as a whole"
        policy_text = f"{_format_optional(self.facts.parameters)} parameters"
        if self.cfg.model.lora_rank:
            policy_text += f"; LoRA of rank {self.cfg.model.lora_rank}"
        yield "policy", policy_text

    def _describe_checkpoints(self) -> str:
        text = f"the policy after the last step, in {self.cfg.model.save_path}"
        save_freq = self.cfg.trainer.save_freq
        if save_freq <= 0:
            return text
        save_interval_text = f"every {save_freq} steps and after the last one"
        return f"{text}; to resume: the newest, {save_interval_text}, in {self.run_dir}/checkpoints"


def make_plan(cfg: PPOConfig | SFTConfig, facts: PlanFacts | None = None) -> Plan:
    """Return the plan of a run with ``cfg``; ``facts`` default to ``gather_facts(cfg)``."""
    facts = gather_facts(cfg) if facts is None else facts
    return PPOPlan(cfg, facts) if isinstance(cfg, PPOConfig) else SFTPlan(cfg, facts)


# ---- facts about machine and policy --------------------------------------------------------------


def gather_facts(cfg: PPOConfig | SFTConfig) -> PlanFacts:
    """Return the facts that can be read without torch: CPU cores, memory, policy size on disk."""
    cold_start_config_name = ""
    policy_size = PolicySize()
    # The size stays unknown if a file or the config of the cold start is invalid. Checks report it.
    expected_errors = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    with contextlib.suppress(*expected_errors):
        if isinstance(cfg, PPOConfig) and derive.is_policy_missing(cfg):
            cold_start_config_name = get_cold_start_config_name(cfg)
            policy_size = _find_policy_size(build_cold_start_config(cfg))
        else:
            policy_size = _find_policy_size(cfg)
    device = guess_device(cfg.trainer.device)
    return PlanFacts(
        cores=available_cpus(),
        memory_gb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
        device=device,
        device_memory_gb=_read_gpu_memory_gb() if device == "cuda" else None,
        cold_start_config_name=cold_start_config_name,
        **dataclasses.asdict(policy_size),
    )


def _find_policy_size(cfg: PPOConfig | SFTConfig) -> PolicySize:
    """Return the size of the existing policy, or of the new one that a supervised run trains."""
    if isinstance(cfg, SFTConfig) and cfg.model.path is None:
        vocab_size = cfg.model.vocab_size
        return PolicySize(memory.count_new_parameters(cfg.model.new, vocab_size), vocab_size)
    path = cfg.actor_rollout_ref.model.path if isinstance(cfg, PPOConfig) else cfg.model.path
    return memory.read_policy_size(Path(path)) if path else PolicySize()


def _read_gpu_memory_gb() -> float | None:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=10)
        return min(map(int, output.split())) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _count_val_tasks(cfg: PPOConfig) -> int | None:
    num_declared_tasks = derive.count_tasks_of_env_section(cfg.env, "val")
    if num_declared_tasks is None or cfg.env.val_tasks is None:
        return num_declared_tasks
    return min(num_declared_tasks, cfg.env.val_tasks)


# ---- texts of the plan ---------------------------------------------------------------------------


def _format_note(note: str) -> str:
    return f"; {note}" if note else ""


def _describe_policy_source(cfg: PPOConfig) -> str:
    trainer = cfg.trainer
    if trainer.resume_mode == "resume_path":
        return f"checkpoint {trainer.resume_from_path}"
    path = str(cfg.actor_rollout_ref.model.path)
    checkpoint_directory = Path(trainer.default_local_dir) / "checkpoints"
    should_resume = trainer.resume_mode == "auto" and checkpoint_directory.is_dir()
    return f"{path}, or the newest checkpoint in {checkpoint_directory}" if should_resume else path


def _bytes_to_gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / GIB


def _describe_sft_data(cfg: SFTConfig) -> str:
    files = cfg.data.train_files
    if not files:
        return f"{cfg.data.episodes:,} episodes"
    names = ", ".join(Path(file).name for file in files[:MAX_NAMED_FILES])
    num_others = len(files) - MAX_NAMED_FILES
    return f"{names} and {_format_count(num_others, 'other file')}" if num_others > 0 else names


def _format_count(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def _format_optional(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _format_memory(
    needed_gb: float | None, available_gb: float | None, gpu_memory_gb: float | None = None
) -> str:
    is_on_cpu = gpu_memory_gb is None
    suffix = "for weights, optimizer, engines and logits" if is_on_cpu else "of host memory"
    text = "?" if needed_gb is None else f"about {needed_gb:.1f} GiB per node {suffix}"
    if gpu_memory_gb is not None:
        text = f"about {gpu_memory_gb:.1f} GiB per GPU for an update; {text}"
    return text if available_gb is None else f"{text}; this machine has {available_gb:.1f} GiB"
