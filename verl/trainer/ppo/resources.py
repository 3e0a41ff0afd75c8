"""Who runs where: roles, resource pools, and the worker groups one training run consists of."""

import logging
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import ray

from verl.protocol import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 600.0
SYNC_TIMEOUT_S = 300.0


class Role(Enum):
    """What a group of workers does."""

    Actor = "actor"
    Rollout = "rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "reward_model"


@dataclass
class ResourcePoolManager:
    """Named pools of devices and which role lives in which.

    ``resource_pool_spec`` maps a pool's name to its processes per node, for example ``{"global_pool": [8, 8]}``;
    ``mapping`` maps a role to the name of a pool.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    use_gpu: bool = False
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Reserve every pool's devices; a pool the cluster cannot hold is refused with what it lacks."""
        for name, processes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=processes, use_gpu=self.use_gpu, name_prefix=name
            )

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """The pool in which ``role`` lives."""
        return self.resource_pool_dict[self.mapping[role]]
