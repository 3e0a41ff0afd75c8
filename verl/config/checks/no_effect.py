"""Refusal of keys that have no effect in this framework, but name data, models or rewards."""

from verl.config import derive
from verl.config.problems import CheckContext, Problems, build_conflict, build_problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import MissingKeyError, collect_section_keys, value_at_path

SPLIT_BY_FILES_KEY = {"data.train_files": "train", "data.val_files": "val"}
# Keys about data files, which have no effect if an environment provides the tasks.
DATASET_KEYS = (
    "data.prompt_key",
    "data.reward_fn_key",
    "data.custom_cls.path",
    "data.custom_cls.name",
)


def refuse_keys_without_effect(cfg: PPOConfig | SFTConfig, _ctx: CheckContext) -> Problems:
    """Refuse keys that are set, have no effect, and name data, a model or a reward."""
    for key in collect_section_keys(type(cfg)).values():
        unused_annotation = key.unused_annotation
        if key.is_section or unused_annotation is None or not unused_annotation.instead:
            continue
        try:
            value = value_at_path(cfg, key.path)
        except MissingKeyError:
            continue  # already refused for another reason
        default = key.default_value
        if value != default:
            why, fix = unused_annotation.why, unused_annotation.instead
            yield build_problem(cfg, key.path, why, f"{default!r}", fix, "no_effect")


def check_data_files(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Refuse data files that the environment ignores, and keys that contradict ``env.<name>``."""
    uses_files = derive.uses_file_tasks(cfg)
    yield from _check_contradictions(cfg) if uses_files else _check_unused_data_files(cfg)


def _check_contradictions(cfg: PPOConfig) -> Problems:
    keys = collect_section_keys(PPOConfig)
    env_settings = cfg.env.active_section
    for key, setting_name in derive.map_keys_copied_to_env_section(cfg).items():
        value = value_at_path(cfg, key)
        section_value = value_at_path(env_settings, setting_name)
        if key in SPLIT_BY_FILES_KEY and derive.are_placeholder_files(value):
            continue
        if value not in (keys[key].default_value, section_value):
            section_key = f"env.{cfg.env.name}.{setting_name}"
            why = f"it contradicts {section_key}={section_value!r}"
            fix = f"do not set {section_key}"
            yield build_conflict(cfg, key, why, "one of them, or equal values", fix)


def _check_unused_data_files(cfg: PPOConfig) -> Problems:
    env = cfg.env
    keys = collect_section_keys(PPOConfig)
    for key in DATASET_KEYS:
        if value_at_path(cfg, key) != keys[key].default_value:
            why = f"tasks and their texts come from the environment {env.env_name}, not from files"
            fix = "do not set it; rows of files are the tasks if data.train_files names some"
            yield build_problem(cfg, key, why, f"{keys[key].default_value!r}", fix, "no_effect")
    for key, split in SPLIT_BY_FILES_KEY.items():
        files = value_at_path(cfg, key)
        if not files or derive.are_placeholder_files(files):
            continue
        env_settings = env.active_section
        env_files_key = None if env_settings is None else env_settings.get_files_key(split)
        if env_files_key is not None:
            why = f"the environment {env.env_name} reads its tasks from another key"
            fix = f"env.{env.name}.{env_files_key}={files[0]} {key}=[]"
        else:
            why = f"the tasks of the environment {env.env_name} would be used instead"
            fix = (
                f"do not set {key}, to use the environment; or do not set env.env_name, to use the "
                "rows of the files (--config-name ppo_trainer if the config sets it)"
            )
        yield build_problem(cfg, key, why, "no files with an environment", fix, "no_effect")


def check_dependent_keys(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Refuse keys that have no effect because a key that they depend on is not set."""
    function = cfg.custom_reward_function
    if function.path is None and function.name != "compute_score":
        key = "custom_reward_function.name"
        why = "no file with this function is named, and rewards would be the environment's"
        fix = "custom_reward_function.path=FILE"
        yield build_problem(cfg, key, why, "a function of a file", fix, "no_effect")
    if cfg.reward_model.weights and function.path is None and not derive.has_file_task_grader(cfg):
        key = "reward_model.weights"
        why = "there is no function that returns several rewards"
        yield build_problem(cfg, key, why, "{}", "custom_reward_function.path=FILE", "no_effect")
    if cfg.trainer.resume_from_path and cfg.trainer.resume_mode == "auto":
        why = "resume_mode=auto continues from the newest checkpoint of the run, not from this one"
        key = "trainer.resume_from_path"
        yield build_problem(cfg, key, why, "null", "trainer.resume_mode=resume_path", "no_effect")
