"""Values that are determined while a run starts, after its config was checked and written.

``config.yaml`` keeps the paths and names of the user. The processes of the run read the
``RunPlan.config``, a frozen copy with the values of this module.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_system.environments.env_registry import find_settings_class
from agent_system.environments.settings import EnvSettings, FunctionFromFile
from verl.config.derive import count_training_steps
from verl.config.schema import PPOConfig
from verl.config.settings import RunsCode, Section, value_at_path

PATH_KEYS = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_from_path",
    "custom_reward_function.path",
)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Configuration of the processes of a run, its device, and its number of rollout engines.

    ``config`` has absolute paths, the commits of its models, the steps of its optimizers and the
    transport of its weights. ``device`` (``cpu``, ``cuda``) holds for all workers.
    """

    config: PPOConfig
    device: str
    engines: int


def count_optimizer_steps(cfg: PPOConfig, train_tasks: int) -> dict[str, int]:
    """Return ``<section>.optim.total_training_steps`` of the optimizers for which it is not set."""
    total = count_training_steps(cfg, train_tasks)
    # The actor is not updated in the training steps of critic_warmup.
    actor_total = total - cfg.trainer.critic_warmup
    sections = {"actor_rollout_ref.actor": actor_total, "critic": total}
    values = {}
    for path, steps in sections.items():
        section = value_at_path(cfg, path)
        if section.optim.total_training_steps < 1:
            updates = section.ppo_mini_batches * section.ppo_epochs
            values[f"{path}.optim.total_training_steps"] = max(1, steps) * updates
    return values


def collect_absolute_paths(cfg: PPOConfig) -> dict[str, Any]:
    """Return the keys of ``cfg`` that are paths, with values relative to the working directory.

    The values are absolute because Ray may start its workers in another directory. The paths of
    models are not included; see ``verl.models.hub.pin_revision``.
    """
    values: dict[str, Any] = {
        path: make_absolute(value_at_path(cfg, path))
        for path in PATH_KEYS
        if value_at_path(cfg, path)
    }
    env = cfg.env
    if env.kwargs:
        values["env.kwargs"] = _make_kwargs_absolute(env.env_name, env.kwargs)
    mixture: Any = env.active_section
    # Only the settings of a mixture have parts: names of environments, with their weights.
    part_names = getattr(mixture, "part_weights", ())
    for name in (env.name, *(part_name.split("/", 1)[0] for part_name in part_names)):
        settings = getattr(env, name, None) if name.isidentifier() else None
        if isinstance(settings, EnvSettings):
            values[f"env.{name}"] = settings.model_copy(
                update=dict(_list_absolute_settings(settings))
            )
    part_kwargs = mixture.kwargs if part_names else {}
    if part_kwargs:
        kwargs = {part: _make_kwargs_absolute(part, keys) for part, keys in part_kwargs.items()}
        values[f"env.{env.name}"] = mixture.model_copy(update={"kwargs": kwargs})
    return values


def make_absolute(path: str) -> str:
    """Return ``path`` as an absolute path, with ``~`` expanded."""
    return str(Path(path).expanduser().absolute())


def _make_kwargs_absolute(env_name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` of the section of an environment, with absolute paths."""
    settings = find_settings_class(env_name).model_validate(kwargs)
    changed = settings.model_copy(update=dict(_list_absolute_settings(settings)))
    return {**kwargs, **changed.model_dump(mode="json", include=set(kwargs), exclude_unset=True)}


def _list_absolute_settings(settings: Section) -> Iterator[tuple[str, Any]]:
    """Yield the names of the settings of an environment that are paths, and absolute values."""
    for name, value in vars(settings).items():
        markers = type(settings).model_fields[name].metadata
        if name == "data_dir" and value:
            yield name, make_absolute(value)
        elif name in ("train_files", "val_files"):
            yield name, [make_absolute(file) for file in value]
        elif isinstance(value, FunctionFromFile) and value.path:
            yield name, value.model_copy(update={"path": make_absolute(value.path)})
        elif value and any(isinstance(marker, RunsCode) for marker in markers):
            yield name, _make_functions_absolute(value)


def _make_functions_absolute(value: Any) -> Any:
    """Return ``FILE.py:NAME``, also in lists, with absolute files; all other values unchanged."""
    if isinstance(value, list):
        return [_make_functions_absolute(item) for item in value]
    file, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{make_absolute(file)}{colon}{name}" if file.endswith(".py") else value
