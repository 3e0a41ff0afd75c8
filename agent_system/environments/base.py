"""Re-export of the public names of environments, for user code that imports this older path."""

from agent_system.environments.env import (
    Env,
    Observation,
    Step,
    Task,
)
from agent_system.environments.expert_protocol import (
    Decision,
    EpisodeStart,
    Expert,
    ExpertPlayer,
    Noise,
    Thought,
    knows_all,
    no_symbols,
    says_no_level,
)
from agent_system.environments.package import (
    EnvPackage,
    Mixture,
    TaskText,
    no_images,
    no_variants,
)
from agent_system.environments.prompts import (
    Prompts,
    prompts_for,
    shows_level_prompts,
)

__all__ = [
    "Decision",
    "Env",
    "EnvPackage",
    "EpisodeStart",
    "Expert",
    "ExpertPlayer",
    "Mixture",
    "Noise",
    "Observation",
    "Prompts",
    "Step",
    "Task",
    "TaskText",
    "Thought",
    "knows_all",
    "no_images",
    "no_symbols",
    "no_variants",
    "prompts_for",
    "says_no_level",
    "shows_level_prompts",
]
