"""``env``: the environment, its groups, its processes."""

from typing import Annotated, Any, Literal

from verl.config.schema.accepted import AcceptedEnv
from verl.config.settings import (
    NULL,
    Derived,
    EnvSection,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    RunsCode,
    Section,
    Seed,
)
from verl.config.settings.section import OpenSection
from verl.names import History


class EnvRollout(Section):
    """How often a task is played."""

    n: Derived[PositiveInt] = NULL
    """group size: plays of the same task from the same start state; null: 8 where the estimator
    compares plays, else 1"""
    carry_over: NonNegativeInt = 0
    """groups of a step that need not be done: they go on with the next weights and come later, so
    that nobody waits for the slowest; with trainer.rollout_overlap=one_step"""
    carry_over_steps: PositiveInt = 4
    """steps after which a group that goes on is waited for"""


class EnvConfig(AcceptedEnv, OpenSection):
    """The environment that agents act in. Times in seconds.

    Each environment has a section of its name here (``env.frozen_lake``), which its package
    declares.
    """

    env_name: Annotated[str, RunsCode(by_place=True)] = ""
    """name in the environment registry, with a variant after a slash (NAME/VARIANT), or
    the place of a package: module:ATTRIBUTE; empty: rows of data.train_files where the job names
    files, else the launcher's default"""
    # Apart from trainer.seed: runs with other weights and samples can choose the same tasks.
    seed: Seed = 0
    """seed of the choice of tasks"""
    max_steps: PositiveInt = 50
    """steps per episode"""
    history: History = "window"
    """append: the whole conversation is one row; window: each step is a row with a re-rendered
    prompt"""
    history_length: NonNegativeInt = 2
    """past steps that a window prompt shows"""
    max_turn_tokens: Derived[PositiveInt] = NULL
    """tokens sampled per turn; null: data.max_response_length"""
    rollout: EnvRollout = EnvRollout()
    """how often a task is played"""
    num_workers: PositiveInt = 2
    """processes that host environments, of each collector"""
    envs_per_worker: PositiveInt = 16
    """environments per process"""
    reset_timeout_s: NonNegative = 60.0
    """deadline of a reset"""
    step_timeout_s: NonNegative = 30.0
    """deadline of a step"""
    on_abort: Literal["drop_group", "keep_rest"] = "drop_group"
    """what a broken trajectory does to the group it belongs to"""
    num_collectors: PositiveInt = 1
    """Ray actors that play trajectories"""
    train_tasks: PositiveInt | None = None
    """training tasks used; null: all of them"""
    val_tasks: PositiveInt | None = 128
    """tasks of the frozen validation panel, at most; null: all of them, which is the default for
    rows of files"""
    allow_retokenized: bool = False
    """train on text that had to be tokenised again"""
    kwargs: dict[str, Any] = {}
    """keys of the environment that env_name names, whatever its section is called"""

    @property
    def name(self) -> str:
        """The name of the environment's section: ``env_name`` without its variant."""
        return self.env_name.split("/", 1)[0]

    @property
    def settings(self) -> EnvSection | None:
        """The section of the environment that is played; None where its package is not known."""
        # A place (module:ATTRIBUTE) is no name, and has no section.
        found = getattr(self, self.name, None) if self.name.isidentifier() else None
        return found if isinstance(found, EnvSection) else None
