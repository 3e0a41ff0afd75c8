"""Who runs where: roles, resource pools, and the worker groups one training run consists of."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from verl.protocol import DataProto
from verl.records import WeightSketch, WrittenFiles
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.calls import gather
from verl.trainer.ppo.interfaces import (
    ActorGroup,
    CriticGroup,
    ReferenceGroup,
    RewardGroup,
)
from verl.trainer.ppo.minibatch_sharding import (
    FORWARD,
    QUESTIONS,
    score_on_ranks,
    select_columns,
)
from verl.trainer.ppo.weight_sync import verify_weights_changed, verify_weights_received
from verl.workers.rollout.base import EnginePart
from verl.workers.rollout.calls import SYNC_TIMEOUT_S, call_engines

logger = logging.getLogger(__name__)
WRITE_TIMEOUT_S = 3600.0  # for all ranks to write their shards
ASK_AGAIN_S = 0.2


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

    ``resource_pool_spec`` maps a pool's name to its processes per node, for example
    ``{"global_pool": [8, 8]}``; ``mapping`` maps a role to the name of a pool. Roles of one pool
    share its devices.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    use_gpu: bool = False
    cpus_per_worker: float = 1.0
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Describe every pool to Ray; devices are reserved when its first worker starts."""
        for name, processes in self.resource_pool_spec.items():
            residents = sum(pool == name for pool in self.mapping.values())
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=processes,
                use_gpu=self.use_gpu,
                name_prefix=name,
                max_colocate_count=max(1, residents),
                cpus_per_worker=self.cpus_per_worker,
            )

    def reserve(self) -> None:
        """Reserve the devices of all pools now, those first that need most of one node: they find
        the fewest places.
        """
        pools = self.resource_pool_dict.values()
        for pool in sorted(pools, key=lambda pool: max(pool.process_on_nodes), reverse=True):
            pool.slots()

    def share(self, *roles: Role) -> bool:
        """Whether ``roles`` live in the same pool."""
        return len({self.mapping[role] for role in roles}) == 1

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """The pool in which ``role`` lives."""
        return self.resource_pool_dict[self.mapping[role]]

    def shutdown(self) -> None:
        """Give every reservation back."""
        for pool in self.resource_pool_dict.values():
            pool.shutdown()


class TrainingWorkers:
    """The worker groups of a run and what the trainer and the collector ask of them.

    ``actor`` trains the policy, ``ref`` (optional) is the frozen reference, ``critic`` (optional)
    the value function, ``reward_model`` (optional) scores plays; ``rollout_workers`` are the
    handles of the engines that sample; ``weight_transfer`` is how they get weights: ``store``,
    ``ipc`` or ``nccl``; ``engines_sleep`` while the others need the devices that they share. Rows
    that are scored are spread over the ranks by their tokens where ``balanced``.
    """

    def __init__(
        self,
        actor: ActorGroup,
        rollout_workers: Sequence[Any],
        ref: ReferenceGroup | None = None,
        critic: CriticGroup | None = None,
        balanced: bool = True,
        reward_model: RewardGroup | None = None,
        weight_transfer: str = "store",
        engines_sleep: bool = True,
    ) -> None:
        self.actor = actor
        self.rollout_workers = rollout_workers
        self.ref = ref
        self.critic = critic
        self.balanced = balanced
        self.reward_model = reward_model
        self.weight_transfer = weight_transfer
        self.engines_sleep = engines_sleep
        self._engine_totals: dict[str, float] = {}
        self._asleep = False
        self._last_sent: WeightSketch | None = None

    @classmethod
    def start(
        cls,
        specs: Mapping[Role, RayClassWithInitArgs],
        pools: ResourcePoolManager,
        rollout_workers: Sequence[Any],
        balanced: bool = True,
        weight_transfer: str = "store",
    ) -> "TrainingWorkers":
        """Start a group per role, or for several that share processes, load their models one after
        another, and wait for the engines, which load at the same time; where they share GPUs with
        the groups, they come first.

        Raises ``TypeError`` when the worker class of a role lacks a method the trainer calls.
        """
        shared = pools.share(Role.Actor, Role.Rollout)
        engines_first = shared and pools.use_gpu
        if engines_first:
            # An engine measures what is free on its device: nothing may come or go meanwhile.
            call_engines(rollout_workers, "ready")
            call_engines(rollout_workers, "sleep", 2)
        groups: dict[Role, RayWorkerGroup] = {}
        for role, spec in specs.items():
            group = RayWorkerGroup(pools.get_resource_pool(role), spec, name_prefix=role.value)
            parts = group.spawn(spec.housed)
            groups |= {Role(name): part for name, part in parts.items()} or {role: group}
        actor = groups[Role.Actor]
        ref = groups.get(Role.RefPolicy)
        critic = groups.get(Role.Critic)
        reward_model = groups.get(Role.RewardModel)
        # Groups gain their methods when they start; from here on they are what their role says.
        if not isinstance(actor, ActorGroup):
            raise TypeError(f"{actor.worker_cls.__name__} lacks methods of an ActorGroup")
        if ref is not None and not isinstance(ref, ReferenceGroup):
            raise TypeError(f"{ref.worker_cls.__name__} lacks methods of a ReferenceGroup")
        if critic is not None and not isinstance(critic, CriticGroup):
            raise TypeError(f"{critic.worker_cls.__name__} lacks methods of a CriticGroup")
        if reward_model is not None and not isinstance(reward_model, RewardGroup):
            raise TypeError(f"{reward_model.worker_cls.__name__} lacks methods of a RewardGroup")
        # One after another: rank 0 holds a whole model in host memory while it loads.
        for group in groups.values():
            group.submit("init_model").get()
        call_engines(rollout_workers, "ready")
        workers = cls(
            actor,
            rollout_workers,
            ref,
            critic,
            balanced,
            reward_model,
            weight_transfer,
            engines_sleep=shared,
        )
        workers._asleep = engines_first
        return workers

    @property
    def data_parallel_size(self) -> int:
        """Ranks among which rows are split."""
        return self.actor.world_size

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference policy."""
        return self.ref is not None

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return old log-probs and entropies of rows and the answers to their questions."""
        return self._score(self.actor.compute_log_prob, select_columns(data, FORWARD, QUESTIONS))

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs under the reference policy; raises ``ValueError`` where there is none."""
        if self.ref is None:
            raise ValueError("this run has no reference policy")
        return self._score(self.ref.compute_ref_log_prob, select_columns(data, FORWARD, ()))

    def compute_values(self, data: DataProto) -> DataProto:
        """Values of the states of rows; raises ``ValueError`` where there is no critic."""
        if self.critic is None:
            raise ValueError("this run has no critic")
        return self._score(self.critic.compute_values, select_columns(data, FORWARD, ()))

    def _score(self, call: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
        return score_on_ranks(call, data, self.data_parallel_size, self.balanced)

    def sleep_engines(self) -> None:
        """Have every engine free its device memory for the training groups; it loses its weights.
        Engines with GPUs of their own stay awake.
        """
        if self._asleep or not self.engines_sleep:
            return
        call_engines(self.rollout_workers, "sleep", 2)
        self._asleep = True

    def wake_engines(self) -> None:
        """Give engines that sleep the memory for their weights; ``sync_weights`` sends these and
        then gives them the memory for their caches.
        """
        self._wake("weights")

    def sync_weights(self, version: int, updated: bool = False) -> None:
        """Send the actor's weights, which the driver never holds, to the engines. ``updated``: the
        optimizer took a step with a gradient since the last sync.

        Raises ``WeightSyncError`` where an engine did not get them, or where they equal those of
        the last sync although they were ``updated``.
        """
        received = self._store(version) if self.weight_transfer == "store" else self._send(version)
        self._wake("kv_cache")
        self._asleep = False
        answer = self.actor.call_refs("weight_sketch")[:1]
        sent: WeightSketch = gather(answer, SYNC_TIMEOUT_S, ["fingerprints of the weights"])[0]
        verify_weights_received(sent, received, version)
        if updated:
            verify_weights_changed(self._last_sent, sent, version)
        self._last_sent = sent

    def _store(self, version: int) -> list[dict[str, int]]:
        """Send the weights of rank 0 through the object store."""
        weights, *others = self.actor.call_refs("export_weights")
        received = call_engines(self.rollout_workers, "update_weights", weights, version)
        # The other ranks take part and send nothing; their errors are raised here.
        gather(others, SYNC_TIMEOUT_S, ["export of the weights"] * len(others))
        return received

    def _send(self, version: int) -> list[dict[str, int]]:
        """Send the weights from the devices of the ranks to those of the engines."""
        sending = self.actor.call_refs("send_weights", self.rollout_workers, version)
        labels = ["sending of the weights"] * len(sending)
        return gather(sending, SYNC_TIMEOUT_S, labels)[0]

    def _wake(self, part: EnginePart) -> None:
        if self._asleep:
            call_engines(self.rollout_workers, "wake", part)

    def engine_metrics(self) -> dict[str, float]:
        """What the engines did since the last call: ``perf/engine_*``, summed over engines.

        ``perf/engine_batch`` is the tokens sampled per engine step, that is how full the engine
        ran.
        """
        answers = call_engines(self.rollout_workers, "stats")
        keys = ("tokens", "steps", "busy_s")
        totals = {key: float(sum(answer[key] for answer in answers)) for key in keys}
        # Engines count from their start; what happened since the last call is the difference.
        since = {key: total - self._engine_totals.get(key, 0.0) for key, total in totals.items()}
        self._engine_totals = totals
        tokens = since["tokens"]
        busy_s = since["busy_s"]
        return {
            "perf/engine_tokens": tokens,
            "perf/engine_busy_s": busy_s,
            "perf/engine_throughput": tokens / max(busy_s, 1e-9),
            "perf/engine_batch": tokens / max(since["steps"], 1.0),
        }

    def save_checkpoint(self, directory: Path) -> Callable[[], list[WrittenFiles]]:
        """Have every trained group copy its state and begin to write it below ``directory``; the
        function returned waits for the ends and says what each rank wrote.
        """
        self.actor.save_checkpoint(str(directory / "actor"))
        if self.critic is not None:
            self.critic.save_checkpoint(str(directory / "critic"))
        return self._written_files

    def _written_files(self) -> list[WrittenFiles]:
        # Asked again and again, from another thread: ranks answer between their other calls, where
        # one that waited for its write would keep them from training.
        groups = [group for group in (self.actor, self.critic) if group is not None]
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        while True:
            answers = [answer for group in groups for answer in group.written_files()]
            written = [answer for answer in answers if answer is not None]
            if len(written) == len(answers):
                return written
            if time.monotonic() > deadline:
                done = ", ".join(part.writer for part in written) or "none"
                raise TimeoutError(
                    f"{len(answers) - len(written)} of {len(answers)} ranks still write a "
                    f"checkpoint after {WRITE_TIMEOUT_S:g} s; done: {done}"
                )
            time.sleep(ASK_AGAIN_S)

    def load_checkpoint(self, directory: Path) -> None:
        """Load what ``save_checkpoint`` wrote."""
        self.actor.load_checkpoint(str(directory / "actor"))
        if self.critic is not None:
            self.critic.load_checkpoint(str(directory / "critic"))

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """End all groups; those that are busy get ``timeout_s`` together to come to an end."""
        deadline = time.monotonic() + timeout_s
        for group in (self.actor, self.ref, self.critic, self.reward_model):
            if group is not None:
                group.shutdown(max(0.1, deadline - time.monotonic()))
