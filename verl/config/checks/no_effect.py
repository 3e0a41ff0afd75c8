"""Refusal of keys that have no effect here, but name data, models or rewards."""

from verl.config.derive import grades_file_tasks, is_placeholder, shared_data_keys, uses_file_tasks
from verl.config.problems import CheckContext, Problems, build_problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import MissingKey, keys_of, value_at_path

SPLITS = {"data.train_files": "train", "data.val_files": "val"}
COLUMNS = (
    "data.prompt_key",
    "data.reward_fn_key",
    "data.custom_cls.path",
    "data.custom_cls.name",
)


def trains_on_files(cfg: PPOConfig) -> bool:
    """Return True if the job trains on prompts in files."""
    return bool(cfg.data.train_files) and not is_placeholder(cfg.data.train_files)


def check_no_effect(cfg: PPOConfig | SFTConfig, _ctx: CheckContext) -> Problems:
    """Refuse keys without effect that are set and name data, a model or a reward."""
    for key in keys_of(type(cfg)).values():
        unused = key.unused_mark
        if key.is_section or unused is None or not unused.instead:
            continue
        try:
            value = value_at_path(cfg, key.path)
        except MissingKey:
            continue  # already refused for another reason
        default = key.default_value
        if value != default:
            why, fix = unused.why, unused.instead
            yield build_problem(cfg, key.path, why, f"{default!r}", fix, "no_effect")


def check_data_files(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Refuse data files that the environment ignores, and keys that contradict ``env.<name>``."""
    yield from _contradiction_problems(cfg) if uses_file_tasks(cfg) else _unused_data_files(cfg)


def _contradiction_problems(cfg: PPOConfig) -> Problems:
    """Refuse ``data.*`` keys whose copy in ``env.<name>`` is set to another value."""
    keys = keys_of(PPOConfig)
    settings = cfg.env.active_section
    for key, name in shared_data_keys(cfg).items():
        value = value_at_path(cfg, key)
        section_value = value_at_path(settings, name)
        if key in SPLITS and is_placeholder(value):
            continue
        if value not in (keys[key].default_value, section_value):
            section_key = f"env.{cfg.env.name}.{name}"
            why = f"it contradicts {section_key}={section_value!r}"
            fix = f"do not set {section_key}"
            yield build_problem(cfg, key, why, "one of them, or equal values", fix, "contradiction")


def _unused_data_files(cfg: PPOConfig) -> Problems:
    """Refuse files and columns in a job whose tasks come from an environment."""
    env = cfg.env
    keys = keys_of(PPOConfig)
    for key in COLUMNS:
        if value_at_path(cfg, key) != keys[key].default_value:
            why = f"tasks and their texts come from the environment {env.env_name}, not from files"
            fix = "do not set it; rows of files are the tasks if data.train_files names some"
            yield build_problem(cfg, key, why, f"{keys[key].default_value!r}", fix, "no_effect")
    for key, split in SPLITS.items():
        files = value_at_path(cfg, key)
        if not files or is_placeholder(files):
            continue
        settings = env.active_section
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
        yield build_problem(cfg, key, why, "no files with an environment", fix, "no_effect")


def check_pairs(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Refuse keys that have an effect only with another key which is not set."""
    reward = cfg.custom_reward_function
    if reward.path is None and reward.name != "compute_score":
        key = "custom_reward_function.name"
        why = "no file with this function is named, and rewards would be the environment's"
        fix = "custom_reward_function.path=FILE"
        yield build_problem(cfg, key, why, "a function of a file", fix)
    if cfg.reward_model.weights and reward.path is None and not grades_file_tasks(cfg):
        key = "reward_model.weights"
        why = "there is no function that returns several rewards"
        yield build_problem(cfg, key, why, "{}", "custom_reward_function.path=FILE")
    if cfg.trainer.resume_from_path and cfg.trainer.resume_mode == "auto":
        why = "resume_mode=auto continues from the newest checkpoint of the run, not from this one"
        key = "trainer.resume_from_path"
        yield build_problem(cfg, key, why, "null", "trainer.resume_mode=resume_path")
