"""``env``: the environment, its groups, its processes."""

from dataclasses import dataclass
from typing import Any

from verl.trainer.config.schema.field import opt, section

ALFWORLD_TASK_TYPES = {
    "pick_and_place_simple": "pick",
    "look_at_obj_in_light": "light",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "two",
}


@dataclass
class EnvRollout:
    """How often a task is played."""

    n: int = opt(8, "group size: plays of the same task from the same start state", low=1)


@dataclass
class EnvResources:
    """Ray resources per environment worker."""

    num_cpus: float = opt(
        0.1, "CPUs", low=0, unused="environments run in processes of a pool (env.num_workers)"
    )
    num_gpus: float = opt(
        0.0, "GPUs", low=0, unused="environments run in processes of a pool (env.num_workers)"
    )


@dataclass
class AlfworldConfig:
    """ALFWorld games: generated from the installed package, or the official ones where
    ``ALFWORLD_DATA`` has them.
    """

    task_types: list[str] = opt(
        ["pick_and_place_simple"],
        f"household tasks: {', '.join(ALFWORLD_TASK_TYPES)} (or {', '.join(ALFWORLD_TASK_TYPES.values())})",
        choices=(*ALFWORLD_TASK_TYPES, *ALFWORLD_TASK_TYPES.values()),
    )
    source: str = opt(
        "auto",
        "generated games, official ones, or official where they are installed",
        choices=("auto", "generated", "official"),
    )
    receptacles: list[int] = opt([3, 5], "fewest and most receptacles of a generated room")
    objects: list[int] = opt([4, 8], "fewest and most objects of a generated room")
    train_games: int = opt(2000, "generated games to train on", low=1)
    val_games: int = opt(256, "generated games held out: other floor plans, other seeds", low=1)
    seed: int = opt(0, "seed of game generation: the same games in every run", low=0)
    data_dir: str = opt("data/alfworld", "where generated games are stored by content hash")
    prompt: str = opt("full", "length of the instructions", choices=("compact", "full"))
    val_split: str | None = opt(
        None,
        "official games to validate on; null: follows eval_dataset",
        choices=("valid_seen", "valid_unseen"),
    )
    eval_dataset: str = opt(
        "eval_in_distribution",
        "the same by the name job scripts use",
        choices=("eval_in_distribution", "eval_out_of_distribution"),
    )


@dataclass
class EnvConfig:
    """The environment that agents act in. Times in seconds."""

    env_name: str = opt(
        "alfworld", "name in the environment registry; alfworld/AlfredTWEnv is accepted too"
    )
    seed: int = opt(0, "seed of the choice of tasks", low=0)
    max_steps: int = opt(50, "steps per episode", low=1)
    history: str = opt(
        "window",
        "append: the whole conversation is one row; window: each step is a row with a re-rendered prompt",
        choices=("append", "window"),
    )
    history_length: int = opt(2, "past steps that a window prompt shows", low=0)
    levels: bool | None = opt(
        None, "ask the policy for thinking levels; null: follows algorithm.rlvcr.enable"
    )
    max_turn_tokens: int | None = opt(
        None, "tokens sampled per turn; null: data.max_response_length", low=1
    )
    rollout: EnvRollout = section(EnvRollout, "how often a task is played")
    resources_per_worker: EnvResources = section(
        EnvResources, "Ray resources per environment worker"
    )
    num_workers: int = opt(2, "processes that host environments", low=1)
    envs_per_worker: int = opt(16, "environments per process", low=1)
    reset_timeout_s: float = opt(60.0, "deadline of a reset", low=0)
    step_timeout_s: float = opt(30.0, "deadline of a step", low=0)
    on_abort: str = opt(
        "drop_group",
        "what a broken trajectory does to its group",
        choices=("drop_group", "keep_rest"),
    )
    num_collectors: int = opt(1, "Ray actors that play trajectories", low=1)
    train_tasks: int | None = opt(None, "training tasks used; null: all of them", low=1)
    val_tasks: int = opt(128, "tasks of the frozen validation panel, at most", low=1)
    allow_retokenized: bool = opt(False, "train on text that had to be tokenised again")
    alfworld: AlfworldConfig = section(AlfworldConfig, "ALFWorld")
    scienceworld: dict[str, Any] = opt({}, "ScienceWorld; its package checks the keys")
    textworld_express: dict[str, Any] = opt({}, "TextWorldExpress; its package checks the keys")
    textworld: dict[str, Any] = opt({}, "TextWorld; its package checks the keys")
    textarena: dict[str, Any] = opt({}, "TextArena; its package checks the keys")
    twenty_questions: dict[str, Any] = opt({}, "TwentyQuestions; its package checks the keys")
    frozen_lake: dict[str, Any] = opt({}, "FrozenLake; its package checks the keys")
    sokoban: dict[str, Any] = opt({}, "Sokoban; its package checks the keys")
    search: dict[str, Any] = opt({}, "search over a corpus; its package checks the keys")
    shop: dict[str, Any] = opt({}, "the shop; its package checks the keys")
    webshop: dict[str, Any] = opt(
        {}, "the shop under the name job scripts use (env.env_name=webshop)"
    )
    kwargs: dict[str, Any] = opt({}, "section of an environment that has none of its own above")
