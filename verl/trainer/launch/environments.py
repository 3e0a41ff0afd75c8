"""The environments as an extension of the configuration: ``env.<name>`` is the section of each."""

from collections.abc import Collection, Mapping
from typing import Any

from agent_system.environments.env_registry import REGISTRY, canonical, settings_class
from verl.trainer.config.plugged import Extension
from verl.trainer.config.problems import Context, Problems
from verl.trainer.config.schema import PPOConfig, SFTConfig
from verl.trainer.launch.forks import FORK_KEYS
from verl.utils.settings import Section
from verl.utils.settings.reading import from_text, read


class EnvironmentSections:
    """``env.<name>`` for every registered environment."""

    def names(self) -> Collection[str]:
        """The registered names."""
        return list(REGISTRY)

    def section(self, name: str) -> type[Section] | None:
        """The settings of the package; None where a module that it needs is not installed."""
        try:
            return settings_class(name)
        except (ImportError, LookupError, TypeError):
            return None  # said by the checks, which look up the environment that is played

    def present(self, values: Mapping[str, Any]) -> Collection[str]:
        """The environment that is played."""
        # Variants (after the slash) share the section of their environment.
        name = canonical(str(values.get("env_name", ""))).split("/", 1)[0]
        return (name,) if name in REGISTRY else ()


def derive(cfg: PPOConfig | SFTConfig) -> None:
    """Environments are called as the registry spells them."""
    cfg.env.env_name = canonical(cfg.env.env_name)


def check(cfg: PPOConfig | SFTConfig, _ctx: Context) -> Problems:
    """``env.kwargs`` holds keys of the environment that is played."""
    env = cfg.env
    cls = EnvironmentSections().section(env.name) if env.name in REGISTRY else None
    if cls is not None:
        yield from read(cls, from_text(env.kwargs, cls), "env.kwargs").problems.values()


ENVIRONMENTS = Extension(
    "environments",
    sources={"env": EnvironmentSections()},
    derive=derive,
    check=check,
    meanings=FORK_KEYS,
)
