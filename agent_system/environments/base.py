"""Older import path of the public names of ``agent_system.environments``, for user code."""

from agent_system.environments.env import *  # noqa: F403
from agent_system.environments.expert_protocol import *  # noqa: F403
from agent_system.environments.package import *  # noqa: F403
