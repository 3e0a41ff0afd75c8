"""RayWorkerGroup: worker groups whose ranks are Ray actors.

::

    pool = RayResourcePool([2])                           # two devices on one node
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, config))
    group.init_model()                                    # on both ranks
    out = group.compute_log_prob(data)                    # rows split, answers joined
"""

import logging
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from verl.single_controller.base.decorator import Call, Collect
from verl.single_controller.base.errors import WorkerError
from verl.single_controller.base.worker_group import GroupFuture, WorkerGroup
from verl.single_controller.ray.calls import gather, is_done, ray_get
from verl.single_controller.ray.host import WorkerHost
from verl.single_controller.ray.resource_pool import RayResourcePool

logger = logging.getLogger(__name__)

SOLE_ROLE = ""
_PLAIN = (type(None), bool, int, float, str, ray.ObjectRef)  # cheap to send to each rank


@dataclass(frozen=True)
class RoleSpec:
    """A worker class with the arguments of its constructor."""

    worker_cls: type
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class RayClassWithInitArgs:
    """A worker class (plain, or wrapped by ``ray.remote``) with the arguments each rank is
    constructed with.

    ``env_vars`` are set in the process before the class's module is imported there.
    """

    def __init__(
        self, cls: object, *args: object, env_vars: dict[str, str] | None = None, **kwargs: object
    ) -> None:
        self.roles: Mapping[str, RoleSpec] = {SOLE_ROLE: RoleSpec(_plain_class(cls), args, kwargs)}
        self.env_vars = dict(env_vars or {})

    @classmethod
    def of_roles(
        cls, roles: Mapping[str, RoleSpec], env_vars: Mapping[str, str]
    ) -> "RayClassWithInitArgs":
        """Several workers in one process (``create_colocated_worker_cls``)."""
        first = next(iter(roles.values()))
        several = cls(first.worker_cls, env_vars=dict(env_vars))
        several.roles = dict(roles)
        return several

    @property
    def housed(self) -> list[str]:
        """The roles whose workers share processes, by name; empty for a worker alone."""
        return [role for role in self.roles if role != SOLE_ROLE]


class RayWorkerGroup(WorkerGroup):
    """One Ray actor per device of ``resource_pool``, each housing one worker (or one per colocated
    role).

    ``call_timeout_s`` bounds every call that sets no deadline of its own, ``start_timeout_s`` the
    start of the actors and the constructors. Raises ``WorkerTimeoutError`` or ``WorkerDiedError``
    naming rank and method, and exceptions of the workers themselves as they are, with a note of the
    rank.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        name_prefix: str | None = None,
        call_timeout_s: float = 3600.0,
        start_timeout_s: float = 180.0,
    ) -> None:
        roles = ray_cls_with_init.roles
        sole = roles.get(SOLE_ROLE)
        name = name_prefix or (sole.worker_cls.__name__ if sole else "+".join(roles))
        worker_cls = sole.worker_cls if sole else object
        super().__init__(worker_cls, resource_pool.world_size, name, call_timeout_s)
        self._role = SOLE_ROLE
        self._roles = roles
        self._actors: list[Any] = []
        try:
            self._start(resource_pool, ray_cls_with_init, start_timeout_s)
        except BaseException:
            self.kill()  # half a group would hold its resources for nothing
            raise

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, "RayWorkerGroup"]:
        """One group per role, all on this group's actors; each bears the name of its role.

        Raises ``KeyError`` for a role that is not housed here.
        """
        groups: dict[str, RayWorkerGroup] = {}
        for role in prefix_set:
            if role not in self._roles:
                raise KeyError(f"no role {role!r} in this group; it houses {sorted(self._roles)}")
            groups[role] = _RoleView(self, role)
        return groups

    @property
    def workers(self) -> list[Any]:
        """The actor handles in rank order."""
        return list(self._actors)

    def call_refs(self, method: str, *args: object) -> list[Any]:
        """Start ``method`` on every rank; the answers stay in the object store, as references in
        rank order.
        """
        return [actor.call.remote(self._role, method, *args) for actor in self._actors]

    def kill(self) -> None:
        """End the processes at once, those of colocated roles included."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors.clear()  # in place: the views of colocated roles share the list

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Let the workers ``close`` within ``timeout_s``, then end their processes.

        Safe to call twice.
        """
        if not self._actors:
            return
        try:
            gather(
                [actor.close.remote() for actor in self._actors], timeout_s, self._labels("close")
            )
        except (WorkerError, RayError) as error:
            logger.warning("%s: not closed in good order: %s", self.name, error)
        self.kill()

    def _start(self, pool: RayResourcePool, spec: RayClassWithInitArgs, timeout_s: float) -> None:
        # Environment before workers: what a worker's module imports must find it set.
        actor_cls = ray.remote(WorkerHost)
        resources = pool.actor_resources()
        for slot in pool.slots():
            self._actors.append(
                actor_cls.options(scheduling_strategy=slot.strategy, **resources).remote()
            )
        refs = [actor.describe.remote() for actor in self._actors]
        self.placement = gather(refs, timeout_s, self._labels(f"start with {resources}"))
        address, port = ray_get(
            self._actors[0].listen.remote(), timeout_s, f"{self.name}[rank 0].listen"
        )
        envs = [
            {**spec.env_vars, **env} for env in _rank_environments(self.placement, address, port)
        ]
        refs = [
            actor.prepare.remote(env, sys.path)
            for actor, env in zip(self._actors, envs, strict=True)
        ]
        gather(refs, timeout_s, self._labels("prepare"))
        for role, part in spec.roles.items():
            refs = [
                actor.start.remote(role, part.worker_cls, part.args, part.kwargs)
                for actor in self._actors
            ]
            gather(refs, timeout_s, self._labels(f"{part.worker_cls.__name__}.__init__"))

    def _labels(self, method: str) -> list[str]:
        return [f"{self.name}[rank {rank}].{method}" for rank in range(self.world_size)]

    def _future(
        self, method: str, calls: list[Call], collect: Collect, timeout_s: float
    ) -> GroupFuture:
        if not self._actors:
            raise WorkerError(f"{self.name}.{method}: the group has been shut down")
        if self._role not in self._roles:
            raise WorkerError(
                f"{self.name}.{method}: call one of the groups that "
                f"spawn({sorted(self._roles)}) gives"
            )
        labels = self._labels(method)[: len(calls)]
        refs = [
            actor.call.remote(self._role, method, *args, **kwargs)
            for actor, (args, kwargs) in zip(self._actors, _stored_once(calls), strict=False)
        ]
        return GroupFuture(
            lambda t: gather(refs, t, labels), lambda: is_done(refs), collect, timeout_s
        )


class _RoleView(RayWorkerGroup):
    """One role of a group whose processes house several; ``spawn`` makes it."""

    def __init__(self, host: RayWorkerGroup, role: str) -> None:
        # Not the constructor of RayWorkerGroup, which would start processes.
        WorkerGroup.__init__(
            self,
            host._roles[role].worker_cls,
            host.world_size,
            role,
            host.call_timeout_s,
        )
        self._role = role
        self._roles = host._roles
        self._actors = host._actors


def _plain_class(cls: object) -> type:
    if isinstance(cls, type):
        return cls
    # What ray.remote returns is an object that keeps the wrapped class.
    metadata = getattr(cls, "__ray_metadata__", None)
    if metadata is None:
        raise TypeError(f"{cls!r} is neither a class nor one that ray.remote wrapped")
    return metadata.modified_class.__ray_actor_class__


def _rank_environments(
    placement: list[dict[str, Any]], address: str, port: int
) -> list[dict[str, str]]:
    """The environment of each rank; local ranks count the group's ranks on the same node."""
    on_node = Counter(place["node_id"] for place in placement)
    seen: Counter = Counter()
    sockets = loopback_sockets(address)
    environments = []
    for rank, place in enumerate(placement):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(placement)),
            "LOCAL_RANK": str(seen[place["node_id"]]),
            "LOCAL_WORLD_SIZE": str(on_node[place["node_id"]]),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        environments.append(env | sockets)
        seen[place["node_id"]] += 1
    return environments


def loopback_sockets(address: str) -> dict[str, str]:
    """The environment of a process whose collectives are to listen on the loopback alone, as Ray
    does where a node's ``address`` says so; without it they take the machine's outward address.
    """
    if not address.startswith("127."):
        return {}
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def _stored_once(calls: list[Call]) -> list[Call]:
    """Replace arguments that go to several ranks by references: they are serialised once."""
    values: list[Any] = []
    for args, kwargs in calls:
        values += [value for value in (*args, *kwargs.values()) if not isinstance(value, _PLAIN)]
    counts = Counter(map(id, values))
    refs: dict[int, ray.ObjectRef] = {}
    for value in values:
        if counts[id(value)] > 1 and id(value) not in refs:
            refs[id(value)] = ray.put(value)

    def swap(value: object) -> object:
        return refs.get(id(value), value)

    return [
        (tuple(map(swap, args)), {k: swap(v) for k, v in kwargs.items()}) for args, kwargs in calls
    ]
