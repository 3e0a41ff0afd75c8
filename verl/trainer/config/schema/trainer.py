"""``trainer``, ``ray_init`` and ``cold_start``: how long, on what, where to."""

from dataclasses import dataclass

from verl.trainer.config.schema.field import opt

DEVICES = ("auto", "cpu", "cuda")
RESUME_MODES = ("auto", "disable", "resume_path")


@dataclass
class TrainerConfig:
    """Schedule, devices and the run directory. ``*_freq`` in iterations, -1 means never."""

    project_name: str = opt("rlvcr", "first folder below runs/, project of the trackers")
    experiment_name: str = opt("ppo", "second folder below runs/, name of the run")
    seed: int = opt(0, "seed of weights, data order and sampling", low=0)
    total_epochs: int = opt(1, "passes over the training tasks", low=1)
    total_training_steps: int | None = opt(None, "iterations; null: total_epochs decides", low=1)
    critic_warmup: int = opt(0, "iterations that update the critic only", low=0)
    val_before_train: bool = opt(True, "validate before the first iteration")
    val_only: bool = opt(False, "validate and stop")
    test_freq: int = opt(-1, "validate every so many iterations and after the last one", low=-1)
    save_freq: int = opt(
        -1, "save a checkpoint every so many iterations and after the last one", low=-1
    )
    max_actor_ckpt_to_keep: int | None = opt(
        None, "newest actor checkpoints kept; null: all", low=1
    )
    max_critic_ckpt_to_keep: int | None = opt(
        None,
        "newest critic checkpoints kept; null: all",
        low=1,
        unused="actor and critic share a checkpoint: max_actor_ckpt_to_keep",
    )
    resume_mode: str = opt(
        "auto",
        "continue from the newest checkpoint, from none, or from resume_from_path",
        choices=RESUME_MODES,
    )
    resume_from_path: str | None = opt(
        None, "checkpoint to continue from with resume_mode=resume_path"
    )
    n_gpus_per_node: int = opt(1, "devices per node; on CPU the number of FSDP ranks", low=1)
    nnodes: int = opt(1, "nodes", low=1)
    device: str = opt("auto", "what the workers compute on", choices=DEVICES)
    num_threads: int | None = opt(
        None, "CPU threads per training rank; null: shared out from the cores", low=1
    )
    balance_batch: bool = opt(True, "spread rows over devices so that tokens are even")
    default_local_dir: str = opt(
        "runs/${trainer.project_name}/${trainer.experiment_name}", "the run directory"
    )
    rollout_data_dir: str | None = opt(
        None,
        "a second place for every step's trajectories, <step>.jsonl, besides rollouts/ of the run directory",
    )
    validation_data_dir: str | None = opt(None, "the same for the trajectories of validations")
    log_val_generations: int = opt(
        0,
        "validation plays shown by the trackers that can show text: tensorboard, wandb, clearml",
        low=0,
    )
    logger: list[str] = opt(
        ["console"], "trackers: console, tensorboard, wandb, ... (metrics.jsonl is always written)"
    )


@dataclass
class RayInitConfig:
    """A Ray of the run's own, or the cluster at ``address``."""

    address: str | None = opt(
        None,
        "cluster to join: host:port, or auto for this node's; null: RAY_ADDRESS if set, else a Ray of its own",
    )
    num_cpus: int | None = opt(None, "CPUs a Ray of its own may hand out; null: all of them", low=1)
    num_gpus: int | None = opt(None, "GPUs a Ray of its own may hand out; null: all of them", low=0)
    object_store_gb: float | None = opt(
        None, "object store of a Ray of its own, GB; null: 1", low=0.1
    )
    log_to_driver: bool = opt(False, "show what the workers print on the terminal as well")


@dataclass
class ColdStartConfig:
    """A policy made by supervised learning when ``actor_rollout_ref.model.path`` does not exist."""

    enable: bool = opt(False, "make the policy first when it is missing")
    config_name: str = opt("quickstart_sft", "config of main_sft that makes it")
    overrides: list[str] = opt([], "overrides of that config")
