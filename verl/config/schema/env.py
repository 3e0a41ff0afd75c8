"""Sections ``data`` (prompt files, batch sizes) and ``env`` (environment and its processes)."""

from typing import Annotated, Any, Literal

from annotated_types import Gt

from verl.config.settings import (
    NULL,
    VERL,
    VERL_AGENT,
    Derived,
    EnvSection,
    ExtensibleSection,
    NamesCode,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Section,
    Seed,
    Unused,
)
from verl.names import History

UNUSED_ENV_RESOURCES = Unused(
    "environments run in a pool of processes (env.num_workers)", VERL_AGENT
)


class EnvRollout(Section):
    """Group size (trajectories per task), and how many groups may continue in a later step."""

    n: Derived[PositiveInt] = NULL
    """group size: trajectories of the same task from the same start state; null: 8 if the estimator
    compares trajectories of a group, else 1"""
    carry_over: NonNegativeInt = 0
    """largest number of groups that may be unfinished at the end of a rollout (partial rollout):
    they continue in a later step with the next weights; needs trainer.rollout_overlap=one_step"""
    carry_over_steps: PositiveInt = 4
    """training steps after which the rollout waits for an unfinished group"""


class EnvCompaction(Section):
    """Compaction: when a row is full, the next one begins with a summary of the earlier turns."""

    enable: bool = False
    """ask for a summary if the next turn does not fit into the row, and begin a new row with it;
    needs env.history=append or chat"""
    max_summary_tokens: PositiveInt = 256
    """tokens sampled per summary, at most; a longer summary is cut there. Every row keeps this many
    tokens and those of the instruction free"""
    instruction: str = (
        "The context is full. Summarise what you need to continue: what you have learned, what you "
        "have done, and what remains to be done. You will see only the task and this summary."
    )
    """message of the user that asks for a summary"""
    introduction: str = "Summary of the earlier turns:"
    """text before the summary in the next row"""


class EnvResources(Section):
    """``env.resources_per_worker``: Ray resources per environment worker."""

    num_cpus: Annotated[NonNegative, UNUSED_ENV_RESOURCES] = 0.1
    """CPUs per environment worker"""
    num_gpus: Annotated[NonNegative, UNUSED_ENV_RESOURCES] = 0.0
    """GPUs per environment worker"""


class EnvConfig(ExtensibleSection):
    """The environment that agents act in.

    Each registered environment has a section of its name here (``env.frozen_lake``), which its
    package declares.
    """

    resources_per_worker: EnvResources = EnvResources()
    """Ray resources per environment worker"""
    env_name: Annotated[str, NamesCode(only_import_paths=True)] = ""
    """name in the environment registry, with a variant after a slash (NAME/VARIANT), or the import
    path of a package, module:ATTRIBUTE; empty: rows of data.train_files if the job names files,
    else the launcher's default"""
    # Separate from trainer.seed, so that runs with different trainer.seed can use the same tasks.
    seed: Seed = 0
    """seed of the choice of tasks"""
    max_steps: PositiveInt = 50
    """turns per episode, at most"""
    history: History = "window"
    """append: the whole conversation is one row; window: each turn is a row with a re-rendered
    prompt; chat: a prompt is the model's chat template over all messages, which may omit parts of
    earlier answers, and a new row begins where a prompt does not extend the row
    """
    history_length: NonNegativeInt = 2
    """past turns in a window prompt"""
    max_turn_tokens: Derived[PositiveInt] = NULL
    """tokens sampled per turn, at most; null: data.max_response_length"""
    rollout: EnvRollout = EnvRollout()
    """group size and partial rollouts"""
    compact: EnvCompaction = EnvCompaction()
    """summaries that the policy writes when a row is full"""
    num_workers: PositiveInt = 2
    """processes with environments, per collector"""
    envs_per_worker: PositiveInt = 16
    """environments per process"""
    reset_timeout_s: Annotated[float, Gt(0)] = 60.0
    """deadline of a reset, in seconds"""
    step_timeout_s: Annotated[float, Gt(0)] = 30.0
    """deadline of a step of the environment, in seconds"""
    on_abort: Literal["drop_group", "keep_rest"] = "drop_group"
    """treatment of the group of a failed trajectory: drop the group, or keep its other members"""
    num_collectors: PositiveInt = 1
    """Ray actors that generate trajectories"""
    train_tasks: PositiveInt | None = None
    """training tasks used; null: all of them"""
    val_tasks: PositiveInt | None = 128
    """tasks of the frozen validation set, at most; null: all of them, which is the default for
    rows of files"""
    allow_retokenized: bool = False
    """train on replies that an agent returns as text without token ids; they are tokenised again"""
    kwargs: dict[str, Any] = {}
    """settings of the environment that env_name names; also for one without its own section"""

    @property
    def name(self) -> str:
        """Return the name of the environment's section: ``env_name`` without ``/VARIANT``."""
        return self.env_name.split("/", 1)[0]

    @property
    def active_section(self) -> EnvSection | None:
        """Return the section of the environment in use; None if its package is not known."""
        # An import path (module:ATTRIBUTE) is not an attribute name, and has no section.
        section = getattr(self, self.name, None) if self.name.isidentifier() else None
        return section if isinstance(section, EnvSection) else None


class CustomDatasetClass(Section):
    """Section ``data.custom_cls``: a user-provided dataset class."""

    path: Annotated[str | None, NamesCode()] = None
    """Python file that defines the dataset class"""
    name: str | None = None
    """name of the dataset class in its file"""


class DataConfig(Section):
    """Files of prompts, batch sizes in tasks (prompts), and lengths in tokens.

    If ``data.train_files`` names files, every row is a task of one turn. The config then must not
    name an environment.
    """

    val_batch_size: Annotated[
        PositiveInt | None,
        Unused("the whole validation set is one batch; its size is env.val_tasks", VERL),
    ] = None
    """tasks validated at once; null: the whole validation set"""
    return_raw_chat: Annotated[bool, Unused("messages are always kept", VERL_AGENT)] = False
    """keep the message list in addition to the tokens"""
    image_key: Annotated[
        str,
        Unused("prompts of files are text; images come from environments", VERL, "leave it out"),
    ] = "images"
    """column of the files that holds images"""
    train_files: list[str] = []
    """Parquet or JSON-lines files of prompts to train on, for jobs without an environment; the
    placeholder files in job scripts for environments are ignored"""
    val_files: list[str] = []
    """Parquet or JSON-lines files of prompts to validate on"""
    prompt_key: str = "prompt"
    """column of the files that holds the prompt: messages, or the text of one user message"""
    reward_fn_key: str = "data_source"
    """column of the files with the source of a row; results are reported by source"""
    custom_cls: CustomDatasetClass = CustomDatasetClass()
    """a user-provided dataset class: called with the files, it returns an object with __len__ and
    __getitem__"""
    filter_overlong_prompts: bool = False
    """drop rows of files whose prompt is longer than max_prompt_length"""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """without filter_overlong_prompts, treatment of a prompt longer than max_prompt_length: error,
    or cut its last message at the left, at the right or in the middle"""
    train_batch_size: PositiveInt = 16
    """tasks per training step; env.rollout.n trajectories are generated for each"""
    max_prompt_length: PositiveInt = 2048
    """P: longest prompt of a row, in tokens"""
    max_response_length: PositiveInt = 512
    """R: longest response of a row, in tokens: one turn (window) or the trajectory (append)"""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """arguments of the chat template, as {enable_thinking: false}"""
    shuffle: bool = True
    """use a seeded permutation of the tasks in every epoch; false: the order of the files"""

    @property
    def max_row_tokens(self) -> int:
        """Return the number of tokens of the longest row, a prompt and a response."""
        return self.max_prompt_length + self.max_response_length
