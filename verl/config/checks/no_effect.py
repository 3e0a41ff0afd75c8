"""Keys that change nothing and name what is played, learnt or paid: refused, never passed over."""

from verl.config.derive import data_keys, is_placeholder, plays_files
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
    """Whether the job is about prompts in files."""
    return bool(cfg.data.train_files) and not is_placeholder(cfg.data.train_files)


def check_no_effect(cfg: PPOConfig | SFTConfig, _ctx: Context) -> Problems:
    """No key is set that changes nothing and names data, a model or a reward."""
    for key in keys_of(type(cfg)).values():
        if key.is_section or key.unused is None or not key.unused.instead:
            continue
        try:
            value = lookup(cfg, key.path)
        except MissingKey:
            continue  # refused for another reason
        if value != key.default:
            mark = key.unused
            yield problem(cfg, key.path, mark.why, f"{key.default!r}", mark.instead)


def check_data_files(cfg: PPOConfig, _ctx: Context) -> Problems:
    """Prompts of files are not passed over for the tasks of an environment, and files and columns
    are named in one way.
    """
    yield from _contradictions(cfg) if plays_files(cfg) else _files_of_no_use(cfg)


def _contradictions(cfg: PPOConfig) -> Problems:
    """The section of the environment says what the keys that are handed on to it say."""
    keys = keys_of(PPOConfig)
    settings = cfg.env.settings
    for key, name in data_keys(cfg).items():
        value = lookup(cfg, key)
        own = lookup(settings, name)
        if value != keys[key].default and value != own and not _passed_over(key, value):
            where = f"env.{cfg.env.name}.{name}"
            why = f"{where}={own!r} says something else"
            yield problem(cfg, key, why, "one of them, or both alike", f"leave {where} out")


def _passed_over(key: str, value: object) -> bool:
    return key in SPLITS and isinstance(value, list) and is_placeholder(value)


def _files_of_no_use(cfg: PPOConfig) -> Problems:
    """An environment is played, and the job names no files or columns."""
    env = cfg.env
    keys = keys_of(PPOConfig)
    for key in COLUMNS:
        if lookup(cfg, key) != keys[key].default:
            why = f"tasks and their texts come from the environment {env.env_name}, not from files"
            fix = "leave it out; rows of files are played where data.train_files names some"
            yield problem(cfg, key, why, f"{keys[key].default!r}", fix)
    for key, split in SPLITS.items():
        files = lookup(cfg, key)
        if not files or is_placeholder(files):
            continue
        settings = env.settings
        own = None if settings is None else settings.file_key(split)
        if own is not None:
            why = f"the environment {env.env_name} reads its tasks from another key"
            fix = f"env.{env.name}.{own}={files[0]} {key}=[]"
        else:
            why = f"the tasks of the environment {env.env_name} would be played in their place"
            fix = (
                f"leave {key} out, and the environment is played; or leave env.env_name out, and "
                "the rows of the files are (--config-name ppo_trainer, where a config names it)"
            )
        yield problem(cfg, key, why, "none, where an environment is played", fix)


def _grades_files(cfg: PPOConfig) -> bool:
    """Whether a function of the user's own grades rows of files, wherever it was named."""
    own = data_keys(cfg).get("custom_reward_function.path")
    return own is not None and lookup(cfg.env.settings, own) is not None


def check_pairs(cfg: PPOConfig, _ctx: Context) -> Problems:
    """Keys that count only together with another one have it."""
    reward = cfg.custom_reward_function
    if reward.path is None and reward.name != "compute_score":
        key = "custom_reward_function.name"
        why = "no file is named that defines it, and rewards would be the environment's"
        yield problem(cfg, key, why, "a function of a file", "custom_reward_function.path=FILE")
    if cfg.reward_model.weights and reward.path is None and not _grades_files(cfg):
        key = "reward_model.weights"
        why = "no function is named that returns several rewards"
        yield problem(cfg, key, why, "{}", "custom_reward_function.path=FILE")
    if cfg.trainer.resume_from_path and cfg.trainer.resume_mode == "auto":
        why = "resume_mode=auto continues from the run's own newest checkpoint, not from this one"
        key = "trainer.resume_from_path"
        yield problem(cfg, key, why, "null", "trainer.resume_mode=resume_path")
