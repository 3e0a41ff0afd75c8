"""Configuration keys and checks of ``agent_system`` and ``rlvcr``, for the entry points.

Importing this module adds the settings of the environments and of the method to the configuration.
It imports neither torch nor the environments. Its functions import them when they are called.
"""

from collections.abc import Sequence

from agent_system.environments.config_rules import ENVIRONMENTS
from rlvcr.config_checks import METHOD_PLUGIN
from verl.config import plugins
from verl.config.compose import list_override_keys
from verl.config.derive import are_placeholder_files
from verl.config.load import default_config, load_config, read_config  # noqa: F401  (re-exported)
from verl.config.problems import RegisteredNames
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings.hints import EQUIVALENT_SETTINGS
from verl.trainer.cli import PreflightResult
from verl.utils.files import read_yaml_table

MODEL_PATH_KEY = "actor_rollout_ref.model.path"
FILE_KEYS = ("data.train_files", "data.val_files")

plugins.ENVIRONMENT_PLUGINS.append(ENVIRONMENTS)
plugins.METHOD_PLUGINS.append(METHOD_PLUGIN)
EQUIVALENT_SETTINGS.update(read_yaml_table(__file__, "foreign_keys.yaml"))


def collect_registered_names() -> RegisteredNames:
    """Return the names of environments, estimators, policy losses and rollout engines."""
    # Import in the function: these modules import torch, which --help and --cfg job do not need.
    import rlvcr.core_rlvcr  # noqa: F401  (registers the estimators rlvcr and copo)
    from agent_system.environments.env_registry import REGISTRY
    from verl.algos import ADV_ESTIMATORS, POLICY_LOSSES, find_missing_inputs
    from verl.workers.rollout.engine_registry import ENGINES

    inputs_by_estimator = {
        name: find_missing_inputs(estimator, ()) for name, estimator in ADV_ESTIMATORS.items()
    }
    return RegisteredNames(
        REGISTRY.keys(), inputs_by_estimator, POLICY_LOSSES.keys(), ENGINES.keys()
    )


def run_preflight_checks(cfg: PPOConfig, ignores_local_devices: bool = False) -> PreflightResult:
    """Check environment, tokenizer and engine; return problems and facts for the printed plan."""
    from verl.trainer.launch.preflight import run_preflight_checks

    return run_preflight_checks(cfg, ignores_local_devices)


def perform_dry_run(cfg: PPOConfig) -> PreflightResult:
    """Call reward, advantage estimator and policy loss on dummy rows; return the problems."""
    from verl.trainer.launch.dry_run import perform_dry_run

    return perform_dry_run(cfg)


def choose_config_name(overrides: Sequence[str]) -> str:
    """Return ``ppo_trainer`` if the overrides name a policy or data files, else ``quickstart``."""
    value_by_key = dict(
        override.lstrip("+").split("=", 1) for override in overrides if "=" in override
    )
    file_lists = [value_by_key.get(key, "").strip("[]'\" ") for key in FILE_KEYS]
    files = [
        file.strip("'\" ") for value in file_lists for file in value.split(",") if file.strip()
    ]
    has_data_files = any(file and file != "null" for file in files) and not are_placeholder_files(
        files
    )
    return "ppo_trainer" if has_data_files or MODEL_PATH_KEY in value_by_key else "quickstart"


def choose_sft_config_name(overrides: Sequence[str]) -> str:
    """Return ``sft_trainer`` if the overrides name a policy or files, else ``quickstart_sft``."""
    keys = {*list_override_keys(overrides)} & {"model.path", "data.train_files"}
    return "sft_trainer" if keys else "quickstart_sft"


def run_sft_preflight_checks(cfg: SFTConfig) -> PreflightResult:
    """Check files, policy and machine of a supervised run; return problems and plan facts."""
    from verl.trainer.launch.preflight_model import collect_initial_policy_facts
    from verl.trainer.launch.preflight_sft import find_sft_problems

    problems = find_sft_problems(cfg)
    return PreflightResult(problems, {} if problems else collect_initial_policy_facts(cfg))
