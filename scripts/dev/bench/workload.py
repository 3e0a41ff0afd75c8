"""Inputs with which the benchmarks generate trajectories: config, engine and rollout specs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import AutoTokenizer

from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.collector_worker import CollectorWorker
from agent_system.multi_turn_rollout.rollout_loop import make_rollout_specs
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec
from verl.single_controller.ray import init_ray
from verl.trainer.launch.extensions import load_config
from verl.workers.rollout import RolloutWorker


class Workload:
    """Inputs of a rollout of ``tasks`` groups of trajectories.

    The engine is an object in this process. With ``actor=True`` it is a Ray actor, as in a run.
    """

    def __init__(
        self, config_name: str, overrides: Sequence[str], tasks: int, actor: bool = False
    ) -> None:
        self.cfg = load_config(
            config_name, ["algorithm.adv_estimator=grpo", "env.levels=true", *overrides]
        )
        self.path = self.cfg.actor_rollout_ref.model.path
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.settings = RolloutSettings.from_config(
            self.cfg, get_package(self.cfg.env.env_name), is_train=True
        )
        envs = make_envs(self.cfg)[0]
        self.rollout_specs = make_rollout_specs(envs.gen_batch(1, tasks))
        envs.close()
        make_worker: Any = RolloutWorker
        if actor:
            init_ray(self.cfg.ray_init)
            import ray  # after init_ray, whose settings it reads

            # The actor handles the requests of many trajectories at once, so it needs a high
            # concurrency. It reserves no CPU, because a small machine may have none left.
            make_worker = ray.remote(RolloutWorker).options(max_concurrency=64, num_cpus=0).remote
        self.engine = make_worker(self.cfg.actor_rollout_ref, self.path, num_threads=1)

    def make_collector(
        self, collector_class: type[CollectorWorker] = CollectorWorker, **options: Any
    ) -> CollectorWorker:
        """Return a collector that samples with the engine of this workload."""
        template_kwargs = self.cfg.data.apply_chat_template_kwargs
        return collector_class(
            self.cfg.env, self.tokenizer, [self.engine], template_kwargs=template_kwargs, **options
        )

    def reseed_specs(self, name: str) -> list[RolloutSpec]:
        """Return the specs with other sampling seeds, which follow from ``traj_uid``."""
        return [
            replace(rollout_spec, traj_uid=f"{name}/{rollout_spec.traj_uid}")
            for rollout_spec in self.rollout_specs
        ]
