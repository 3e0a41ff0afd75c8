"""``trainer``, ``ray_init`` and ``cold_start``: how long, on what, where to."""

from typing import Annotated, Any

from annotated_types import Ge, Gt
from pydantic import BeforeValidator

from verl.config.schema.accepted import AcceptedTrainer
from verl.config.settings import NonNegativeInt, PositiveInt, RunsCode, Section, Seed
from verl.names import Device, ResumeMode, RolloutOverlap

Seconds = Annotated[float, Gt(0)]


def _off(value: object) -> object:
    # YAML reads a bare off as false.
    return "off" if value is False else value


class TrainerConfig(AcceptedTrainer):
    """Schedule, devices and the run directory. ``*_freq`` in iterations."""

    project_name: str = "rlvcr"
    """first folder below runs/, project of the trackers"""
    experiment_name: str = "ppo"
    """second folder below runs/, name of the run"""
    seed: Seed = 0
    """seed of weights, data order and sampling"""
    total_epochs: PositiveInt = 1
    """passes over the training tasks"""
    total_training_steps: PositiveInt | None = None
    """iterations; null: total_epochs decides"""
    critic_warmup: NonNegativeInt = 0
    """iterations that update the critic only"""
    val_before_train: bool = True
    """validate before the first iteration"""
    val_only: bool = False
    """validate and stop"""
    test_freq: Annotated[int, Ge(-1)] = -1
    """validate every so many iterations and after the last one; -1: never"""
    save_freq: Annotated[int, Ge(-1)] = -1
    """save a checkpoint every so many iterations and after the last one; -1: after the last one
    alone (never in verl's own scripts); 0: never"""
    async_save: bool = True
    """write a checkpoint beside the next iterations, from a copy in host memory; it counts when all
    of it is on disk, and a failed write ends the run at the next save or at the end"""
    max_actor_ckpt_to_keep: PositiveInt | None = None
    """newest actor checkpoints kept; null: all"""
    resume_mode: ResumeMode = "auto"
    """continue from the newest checkpoint, from none, or from resume_from_path"""
    resume_from_path: str | None = None
    """checkpoint to continue from with resume_mode=resume_path"""
    n_gpus_per_node: PositiveInt = 1
    """devices per node; on CPU the number of FSDP ranks"""
    nnodes: PositiveInt = 1
    """nodes"""
    device: Device = "auto"
    """what the workers compute on"""
    num_threads: PositiveInt | None = None
    """CPU threads per training rank; null: shared out from the cores"""
    waiting_log_s: Seconds = 60.0
    """seconds without movement after which the log says what is waited for, then after twice as
    many"""
    stall_timeout_s: Seconds | None = 7200.0
    """seconds without movement after which the stacks of all processes are written and the run
    ends; above the deadlines of single calls, which are an hour at most; null: never"""
    rollout_overlap: Annotated[RolloutOverlap, BeforeValidator(_off)] = "off"
    """one_step: play the next batch while the policy is updated, with the weights from before;
    algorithm.rollout_correction weighs what that changes"""
    balance_batch: bool = True
    """spread rows over devices so that tokens are even"""
    # An interpolation: another experiment name alone moves a run to a directory of its own.
    default_local_dir: str = "runs/${trainer.project_name}/${trainer.experiment_name}"
    """the run directory"""
    rollout_data_dir: str | None = None
    """a second place for every step's trajectories, <step>.jsonl, besides rollouts/ of the run
    directory"""
    validation_data_dir: str | None = None
    """a second place for the trajectories of validations, besides the run directory"""
    profile_steps: list[PositiveInt] = []
    """iterations whose updates are traced by torch.profiler, into profile/ of the run directory"""
    profile_ranks: list[NonNegativeInt] = [0]
    """training ranks that write a trace in profile_steps"""
    log_val_generations: NonNegativeInt = 0
    """validation plays shown by the trackers that can show text: tensorboard, wandb, clearml"""
    logger: list[str] = ["console"]
    """trackers: console, tensorboard, wandb, ... (metrics.jsonl is always written)"""


class RayInitConfig(Section):
    """A Ray of the run's own, or the cluster at ``address``."""

    address: str | None = None
    """cluster to join: host:port, or auto for this node's; null: RAY_ADDRESS if set, else a Ray of
    its own"""
    num_cpus: PositiveInt | None = None
    """CPUs a Ray of its own may hand out; null: all of them"""
    num_gpus: NonNegativeInt | None = None
    """GPUs a Ray of its own may hand out; null: all of them"""
    object_store_gb: Annotated[float, Ge(0.1)] | None = None
    """object store of a Ray of its own, GB; null: 1, and a copy of the policy's weights"""
    runtime_env: Annotated[dict[str, Any], RunsCode()] = {}
    """what every worker finds, as Ray's runtime_env: {env_vars: {HF_HOME: /shared/hf}}; workers of
    a cluster that is joined have the variables of `ray start`, not those of the driver"""
    log_to_driver: bool = False
    """show what the workers print on the terminal as well"""


class ColdStartConfig(Section):
    """A policy made by supervised learning when ``actor_rollout_ref.model.path`` does not exist."""

    enable: bool = False
    """make the policy first when it is missing"""
    # A name here says that the config has a recipe for its policy, which messages may then offer.
    config_name: str | None = None
    """config of main_sft that makes it; null: quickstart_sft"""
    overrides: list[str] = []
    """overrides of the config of main_sft"""
