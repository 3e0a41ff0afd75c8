"""Checks of keys without effect that name data, models or rewards: these are refused."""

from verl.config.derive import data_keys, grades_files, is_placeholder, plays_files
from verl.config.problems import Context, Problems, problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import MissingKey, keys_of, lookup

SPLITS = {"data.train_files": "train", "data.val_files": "val"}
COLUMNS = (
    "data.prompt_key",
    "data.reward_fn_key",
    "data.custom_cls.path",
    "data.custom_cls.name",
)


def names_data(cfg: PPOConfig) -> bool:
    """Return True if the job trains on prompts in files."""
    return bool(cfg.data.train_files) and not is_placeholder(cfg.data.train_files)


def check_no_effect(cfg: PPOConfig | SFTConfig, _ctx: Context) -> Problems:
    """Refuse keys without effect that are set and name data, a model or a reward."""
    for key in keys_of(type(cfg)).values():
        if key.is_section or key.unused is None or not key.unused.instead:
            continue
        try:
            value = lookup(cfg, key.path)
        except MissingKey:
            continue  # already refused for another reason
        if value != key.default:
            mark = key.unused
            yield problem(cfg, key.path, mark.why, f"{key.default!r}", mark.instead, "no_effect")


def check_data_files(cfg: PPOConfig, _ctx: Context) -> Problems:
    """Refuse files that an environment would ignore, and keys that contradict its section."""
    yield from _contradictions(cfg) if plays_files(cfg) else _unused_data_files(cfg)


def _contradictions(cfg: PPOConfig) -> Problems:
    """Check that keys which set keys of the environment's section have the same value there."""
    keys = keys_of(PPOConfig)
    settings = cfg.env.settings
    for key, name in data_keys(cfg).items():
        value = lookup(cfg, key)
        section_value = lookup(settings, name)
        if value != keys[key].default and value != section_value and not _is_ignored(key, value):
            where = f"env.{cfg.env.name}.{name}"
            why = f"it contradicts {where}={section_value!r}"
            fix = f"do not set {where}"
            yield problem(cfg, key, why, "one of them, or equal values", fix, "contradiction")


def _is_ignored(key: str, value: object) -> bool:
    return key in SPLITS and isinstance(value, list) and is_placeholder(value)


def _unused_data_files(cfg: PPOConfig) -> Problems:
    """Refuse files and columns in a job whose tasks come from an environment."""
    env = cfg.env
    keys = keys_of(PPOConfig)
    for key in COLUMNS:
        if lookup(cfg, key) != keys[key].default:
            why = f"tasks and their texts come from the environment {env.env_name}, not from files"
            fix = "do not set it; rows of files are the tasks if data.train_files names some"
            yield problem(cfg, key, why, f"{keys[key].default!r}", fix, "no_effect")
    for key, split in SPLITS.items():
        files = lookup(cfg, key)
        if not files or is_placeholder(files):
            continue
        settings = env.settings
        file_key = None if settings is None else settings.file_key(split)
        if file_key is not None:
            why = f"the environment {env.env_name} reads its tasks from another key"
            fix = f"env.{env.name}.{file_key}={files[0]} {key}=[]"
        else:
            why = f"the tasks of the environment {env.env_name} would be used instead"
            fix = (
                f"do not set {key}, to use the environment; or do not set env.env_name, to use the "
                "rows of the files (--config-name ppo_trainer if the config sets it)"
            )
        yield problem(cfg, key, why, "no files with an environment", fix, "no_effect")


def check_pairs(cfg: PPOConfig, _ctx: Context) -> Problems:
    """Refuse keys that have an effect only with another key which is not set."""
    reward = cfg.custom_reward_function
    if reward.path is None and reward.name != "compute_score":
        key = "custom_reward_function.name"
        why = "no file with this function is named, and rewards would be the environment's"
        yield problem(cfg, key, why, "a function of a file", "custom_reward_function.path=FILE")
    if cfg.reward_model.weights and reward.path is None and not grades_files(cfg):
        key = "reward_model.weights"
        why = "there is no function that returns several rewards"
        yield problem(cfg, key, why, "{}", "custom_reward_function.path=FILE")
    if cfg.trainer.resume_from_path and cfg.trainer.resume_mode == "auto":
        why = "resume_mode=auto continues from the newest checkpoint of the run, not from this one"
        key = "trainer.resume_from_path"
        yield problem(cfg, key, why, "null", "trainer.resume_mode=resume_path")
