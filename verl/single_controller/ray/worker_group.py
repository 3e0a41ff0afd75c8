"""RayWorkerGroup: worker groups whose ranks are Ray actors.

::

    pool = RayResourcePool([2])                           # two devices on one node
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, config))
    group.init_model()                                    # on both ranks
    out = group.compute_log_prob(data)                    # rows split, results concatenated

Several roles can share processes, and thereby one CUDA context per device::

    both = create_colocated_worker_cls({"actor": RayClassWithInitArgs(ActorWorker, config),
                                        "ref": RayClassWithInitArgs(ActorWorker, config)})
    groups = RayWorkerGroup(pool, both).spawn(["actor", "ref"])   # two groups, the same processes
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
from verl.single_controller.base.worker_group import GroupFuture, WorkerError, WorkerGroup
from verl.single_controller.ray.calls import gather_results, ray_get
from verl.single_controller.ray.host import GLOO_INTERFACE, WorkerHost
from verl.single_controller.ray.resource_pool import RayResourcePool

logger = logging.getLogger(__name__)

SOLE_ROLE = ""  # role of the worker in a process with only one worker
# Types of arguments that are sent to each rank separately, because they are small.
_SMALL_TYPES = (type(None), bool, int, float, str, ray.ObjectRef)


@dataclass(frozen=True)
class RoleSpec:
    """Worker class of a role, with the arguments of its constructor."""

    worker_cls: type
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class RayClassWithInitArgs:
    """Worker class ``cls``, plain or from ``ray.remote``, with the arguments of its constructor.

    ``env_vars`` are set in the worker's process before it imports the module of the class.
    """

    def __init__(
        self, cls: object, *args: object, env_vars: dict[str, str] | None = None, **kwargs: object
    ) -> None:
        self.roles: Mapping[str, RoleSpec] = {SOLE_ROLE: RoleSpec(_unwrap_class(cls), args, kwargs)}
        self.env_vars = dict(env_vars or {})

    @property
    def role_names(self) -> list[str]:
        """Return the names of the roles that share a process; empty for a plain worker class."""
        return [role for role in self.roles if role != SOLE_ROLE]


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> RayClassWithInitArgs:
    """Combine worker classes, so that one process has a worker of each role.

    ``class_dict`` maps roles to worker classes. ``RayWorkerGroup.spawn`` returns a group per role.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls: class_dict is empty; it needs a role")
    roles: dict[str, RoleSpec] = {}
    env_vars: dict[str, str] = {}
    for role, worker_class in class_dict.items():
        conflicting_variables = [
            key for key, value in worker_class.env_vars.items() if env_vars.get(key, value) != value
        ]
        # Roles of one process share its environment, so different values would be overwritten.
        if conflicting_variables:
            raise ValueError(
                f"role {role!r} sets the environment variables {conflicting_variables} to other "
                "values than the roles that share its process; fix: use equal values, or do not "
                "colocate it"
            )
        env_vars.update(worker_class.env_vars)
        roles[role] = worker_class.roles[SOLE_ROLE]
    colocated_class = RayClassWithInitArgs(next(iter(roles.values())).worker_cls, env_vars=env_vars)
    colocated_class.roles = roles
    return colocated_class


class RayWorkerGroup(WorkerGroup):
    """Worker group with one Ray actor per device of ``resource_pool``.

    Each actor has one worker, or one per colocated role. ``call_timeout_s`` limits every call.
    ``start_timeout_s`` limits the start of the actors and the constructors. Calls raise
    ``WorkerTimeoutError`` or ``WorkerDiedError`` with rank and method. Exceptions of a worker are
    raised unchanged, with a note that names the rank.
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
        sole_role_spec = roles.get(SOLE_ROLE)
        name = name_prefix or (
            sole_role_spec.worker_cls.__name__ if sole_role_spec else "+".join(roles)
        )
        worker_cls = sole_role_spec.worker_cls if sole_role_spec else object
        super().__init__(worker_cls, resource_pool.world_size, name, call_timeout_s)
        self._role = SOLE_ROLE
        self._roles = roles
        self._actors: list[Any] = []
        try:
            self._start(resource_pool, ray_cls_with_init, start_timeout_s)
        except BaseException:
            self.kill()  # an incomplete group must not hold resources
            raise

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, "RayWorkerGroup"]:
        """Return a worker group of each role in ``prefix_set``, on the actors of this group."""
        groups: dict[str, RayWorkerGroup] = {}
        for role in prefix_set:
            if role not in self._roles:
                raise KeyError(f"no role {role!r} in this group; allowed: {sorted(self._roles)}")
            # Do not call the constructor of RayWorkerGroup: it would start processes.
            group = RayWorkerGroup.__new__(RayWorkerGroup)
            worker_cls = self._roles[role].worker_cls
            WorkerGroup.__init__(group, worker_cls, self.world_size, role, self.call_timeout_s)
            group._role, group._roles, group._actors = role, self._roles, self._actors
            groups[role] = group
        return groups

    @property
    def workers(self) -> list[Any]:
        """Return the Ray actor handles of the workers in rank order."""
        return list(self._actors)

    def call_for_refs(self, method: str, *args: object) -> list[Any]:
        """Start ``method`` on every rank, and return the Ray references of the results."""
        return [actor.call.remote(self._role, method, *args) for actor in self._actors]

    def kill(self) -> None:
        """End the processes at once, including all colocated roles."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors.clear()  # in place, because the groups of colocated roles share the list

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Call ``close`` on the workers, wait at most ``timeout_s``, then end their processes."""
        if not self._actors:
            return
        try:
            close_refs = [actor.close.remote() for actor in self._actors]
            gather_results(close_refs, timeout_s, self._make_labels("close"))
        except (WorkerError, RayError) as error:
            logger.warning("%s: closing the workers failed: %s", self.name, error)
        self.kill()

    def _start(self, pool: RayResourcePool, spec: RayClassWithInitArgs, timeout_s: float) -> None:
        # Set environment variables before the workers start: their modules may read them at import.
        actor_cls = ray.remote(WorkerHost)
        resources = pool.actor_resources()
        for strategy in pool.reserve_slots():
            actor_options = {"scheduling_strategy": strategy, **resources}
            self._actors.append(actor_cls.options(**actor_options).remote())
        refs = [actor.describe_location.remote() for actor in self._actors]
        self.rank_locations = gather_results(
            refs, timeout_s, self._make_labels(f"start with {resources}")
        )
        address, port = ray_get(
            self._actors[0].open_rendezvous_socket.remote(),
            timeout_s,
            f"{self.name}[rank 0].open_rendezvous_socket",
        )
        environments = [
            {**spec.env_vars, **rank_environment}
            for rank_environment in make_rank_environments(self.rank_locations, address, port)
        ]
        refs = [
            actor.set_environment.remote(rank_environment, sys.path)
            for actor, rank_environment in zip(self._actors, environments, strict=True)
        ]
        gather_results(refs, timeout_s, self._make_labels("set_environment"))
        for role, role_spec in spec.roles.items():
            refs = [
                actor.start.remote(role, role_spec.worker_cls, role_spec.args, role_spec.kwargs)
                for actor in self._actors
            ]
            labels = self._make_labels(f"{role_spec.worker_cls.__name__}.__init__")
            gather_results(refs, timeout_s, labels)

    def _make_labels(self, method: str) -> list[str]:
        return [f"{self.name}[rank {rank}].{method}" for rank in range(self.world_size)]

    def _start_calls(self, method: str, calls: list[Call], collect: Collect) -> GroupFuture:
        if not self._actors:
            raise WorkerError(f"{self.name}.{method}: the group has been shut down")
        if self._role not in self._roles:
            raise WorkerError(
                f"{self.name}.{method}: the workers of this group share processes; fix: call the "
                f"method of a group that spawn({sorted(self._roles)}) returns"
            )
        labels = self._make_labels(method)[: len(calls)]
        stored_calls = _store_shared_arguments(calls)
        refs = [
            actor.call.remote(self._role, method, *args, **kwargs)
            for actor, (args, kwargs) in zip(self._actors, stored_calls, strict=False)
        ]
        return GroupFuture(lambda t: gather_results(refs, t, labels), collect, self.call_timeout_s)


def _unwrap_class(cls: object) -> type:
    if isinstance(cls, type):
        return cls
    # A class wrapped by ray.remote has the original class in its metadata.
    ray_metadata = getattr(cls, "__ray_metadata__", None)
    if ray_metadata is None:
        raise TypeError(f"{cls!r} is not a class; allowed: a class, plain or from ray.remote")
    return ray_metadata.modified_class.__ray_actor_class__


def make_rank_environments(
    rank_locations: list[dict[str, Any]], address: str, port: int
) -> list[dict[str, str]]:
    """Return the ``torch.distributed`` environment variables of each rank, such as ``RANK``.

    ``rank_locations`` has the results of ``WorkerHost.describe_location``. ``address`` and ``port``
    are those of the rendezvous socket. Ranks on several nodes let Gloo use the interface of the
    node's address. By default Gloo would use the address of the host name. On many systems that is
    a loopback address.
    """
    num_ranks_by_node = Counter(location["node_id"] for location in rank_locations)
    local_ranks_by_node: Counter = Counter()
    loopback_environment = make_loopback_environment(address)
    environments = []
    for rank, location in enumerate(rank_locations):
        interface = location["interface"]
        interface_environment = {GLOO_INTERFACE: interface} if interface else {}
        environments.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(rank_locations)),
                "LOCAL_RANK": str(local_ranks_by_node[location["node_id"]]),
                "LOCAL_WORLD_SIZE": str(num_ranks_by_node[location["node_id"]]),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                **(loopback_environment or interface_environment),
            }
        )
        local_ranks_by_node[location["node_id"]] += 1
    return environments


def make_loopback_environment(address: str) -> dict[str, str]:
    """Return variables that limit Gloo and NCCL to the loopback interface.

    Returns an empty dict if ``address`` does not begin with "127.".
    """
    if not address.startswith("127."):
        return {}
    loopback_interface = next(
        (
            loopback_interface
            for _, loopback_interface in socket.if_nameindex()
            if loopback_interface.startswith("lo")
        ),
        "lo",
    )
    return {GLOO_INTERFACE: loopback_interface, "NCCL_SOCKET_IFNAME": loopback_interface}


def _store_shared_arguments(calls: list[Call]) -> list[Call]:
    """Replace arguments that several ranks receive by references to Ray's object store."""
    large_arguments = [
        value
        for args, kwargs in calls
        for value in (*args, *kwargs.values())
        if not isinstance(value, _SMALL_TYPES)
    ]
    num_uses_by_id = Counter(map(id, large_arguments))
    refs: dict[int, ray.ObjectRef] = {}
    for value in large_arguments:
        if num_uses_by_id[id(value)] > 1 and id(value) not in refs:
            refs[id(value)] = ray.put(value)

    def replace_by_ref(value: object) -> object:
        return refs.get(id(value), value)

    return [
        (tuple(map(replace_by_ref, args)), {k: replace_by_ref(v) for k, v in kwargs.items()})
        for args, kwargs in calls
    ]
