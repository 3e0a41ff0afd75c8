"""Older import path of the public names of ``agent_system.environments``, for user code."""

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
    ExpertPolicy,
    Noise,
    Thought,
    knows_all_solutions,
    names_no_level,
    no_symbols,
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
    select_prompts,
    shows_level_prompts,
)

__all__ = [
    "Decision",
    "Env",
    "EnvPackage",
    "EpisodeStart",
    "Expert",
    "ExpertPolicy",
    "Mixture",
    "Noise",
    "Observation",
    "Prompts",
    "Step",
    "Task",
    "TaskText",
    "Thought",
    "knows_all_solutions",
    "names_no_level",
    "no_images",
    "no_symbols",
    "no_variants",
    "select_prompts",
    "shows_level_prompts",
]
