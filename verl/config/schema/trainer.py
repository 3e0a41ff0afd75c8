"""Sections ``trainer``, ``ray_init`` and ``cold_start`` of the configuration."""

import os
from typing import Annotated, Any

from annotated_types import Ge, Gt
from pydantic import BeforeValidator

from verl.config.settings import (
    VERL,
    NamesCode,
    NonNegativeInt,
    PositiveInt,
    Section,
    Seed,
    Unused,
)
from verl.names import Device, ResumeMode, RolloutOverlap

Seconds = Annotated[float, Gt(0)]


def _replace_false_by_off(value: object) -> object:
    # YAML reads a bare off as false.
    return "off" if value is False else value


class RunConfig(Section):
    """Name, devices, trackers, timeouts and resumption of a training run."""

    project_name: str = "rlvcr"
    """first folder below runs/, project of the trackers"""
    seed: Seed = 0
    """seed of weights, data order and sampling"""
    resume_mode: ResumeMode = "auto"
    """continue from the newest checkpoint (auto), from none (disable), or from resume_from_path"""
    resume_from_path: str | None = None
    """checkpoint to continue from with resume_mode=resume_path"""
    n_gpus_per_node: PositiveInt = 1
    """devices per node; on CPU the number of FSDP ranks"""
    device: Device = "auto"
    """device of the workers; auto: GPUs if there are some, else CPU"""
    num_threads: PositiveInt | None = None
    """CPU threads per training rank; null: the node's cores divided by its ranks"""
    waiting_log_s: Seconds = 60.0
    """seconds without progress after which the log names the pending calls; the next entry follows
    after twice that time"""
    stall_timeout_s: Seconds | None = 7200.0
    """seconds without progress after which the stacks of all processes are written and the run
    ends; it should exceed the deadlines of single calls, which are one hour at most; null: never"""
    # The default is an interpolation, so that each experiment name has its own directory.
    default_local_dir: str = "runs/${trainer.project_name}/${trainer.experiment_name}"
    """the run directory"""
    logger: list[str] = ["console"]
    """trackers: console, tensorboard, wandb, ... (metrics.jsonl is always written)"""


class TrainerConfig(RunConfig):
    """Schedule, devices and the run directory. ``*_freq`` are in training steps."""

    max_critic_ckpt_to_keep: Annotated[
        PositiveInt | None,
        Unused("actor and critic share a checkpoint: max_actor_ckpt_to_keep", VERL),
    ] = None
    """number of newest critic checkpoints that are kept; null: all"""
    experiment_name: str = "ppo"
    """second folder below runs/, name of the run"""
    total_epochs: PositiveInt = 1
    """number of times that every training task is used"""
    total_training_steps: PositiveInt | None = None
    """training steps; null: as total_epochs gives"""
    critic_warmup: NonNegativeInt = 0
    """training steps that update the critic only"""
    val_before_train: bool = True
    """validate before the first training step"""
    val_only: bool = False
    """validate and stop"""
    test_freq: Annotated[int, Ge(-1)] = -1
    """training steps between two validations; one also follows the last step; -1: never"""
    save_freq: Annotated[int, Ge(-1)] = -1
    """training steps between two checkpoints; one also follows the last step; -1: only after the
    last step (in verl: never); 0: never"""
    async_save: bool = True
    """write a checkpoint during the next training steps, from a copy in host memory; it is valid
    when all files are on disk, and a failed write ends the run at the next save or at the end"""
    max_actor_ckpt_to_keep: PositiveInt | None = None
    """number of newest checkpoints that are kept; null: all"""
    nnodes: PositiveInt = 1
    """nodes"""
    rollout_overlap: Annotated[RolloutOverlap, BeforeValidator(_replace_false_by_off)] = "off"
    """one_step: generate the next batch while the policy is updated, with the weights from before
    the update (one-step off-policy); algorithm.rollout_correction corrects the difference"""
    balance_batch: bool = True
    """assign rows to devices so that each has a similar number of tokens"""
    rollout_data_dir: str | None = None
    """second directory for the trajectories of every step, <step>.jsonl, in addition to rollouts/
    of the run directory"""
    validation_data_dir: str | None = None
    """second directory for the trajectories of validations, in addition to the run directory"""
    profile_steps: list[PositiveInt] = []
    """training steps whose updates torch.profiler traces, into profile/ of the run directory"""
    profile_ranks: list[NonNegativeInt] = [0]
    """training ranks that write a trace in profile_steps"""
    log_val_generations: NonNegativeInt = 0
    """validation trajectories sent to trackers that show text: tensorboard, wandb, clearml"""


class RayInitConfig(Section):
    """A Ray cluster that the run starts locally, or the cluster at ``address``."""

    address: str | None = None
    """cluster to join: host:port, or auto for this node's; null: RAY_ADDRESS if set, else a local
    Ray is started"""
    num_cpus: PositiveInt | None = None
    """CPUs of a local Ray; null: all of them"""
    num_gpus: NonNegativeInt | None = None
    """GPUs of a local Ray; null: all of them"""
    object_store_gb: Annotated[float, Ge(0.1)] | None = None
    """object store of a local Ray, GB; null: what trajectories, rows and weights need, at most
    the free shared memory and half of the available memory"""
    runtime_env: Annotated[dict[str, Any], NamesCode()] = {}
    """environment of every worker, as Ray's runtime_env: {env_vars: {HF_HOME: /shared/hf}}; workers
    of a joined cluster have the variables of `ray start`, not those of the driver"""
    log_to_driver: bool = False
    """also print the output of the workers on the terminal"""

    @property
    def cluster_address(self) -> str | None:
        """Return the address of the cluster that the run joins; None if it starts a local Ray."""
        address = self.address or os.environ.get("RAY_ADDRESS")
        return None if address in ("local", "") else address


class ColdStartConfig(Section):
    """Supervised training of a policy if ``actor_rollout_ref.model.path`` does not exist."""

    enable: bool = False
    """train the policy first if it is missing"""
    # If this key is set, error messages about a missing policy suggest a cold start.
    config_name: str | None = None
    """config of main_sft that trains it; null: quickstart_sft"""
    overrides: list[str] = []
    """overrides of the config of main_sft"""
