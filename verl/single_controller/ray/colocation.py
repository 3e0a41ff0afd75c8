"""Colocation of several roles in one process, so that they share one device context.

both = create_colocated_worker_cls({"actor": RayClassWithInitArgs(ActorWorker, config),
                                    "ref": RayClassWithInitArgs(ActorWorker, config, role="ref")})
groups = RayWorkerGroup(pool, both).spawn(["actor", "ref"])   # two groups, the same processes
"""

from collections.abc import Mapping

from verl.single_controller.ray.worker_group import SOLE_ROLE, RayClassWithInitArgs, RoleSpec


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> RayClassWithInitArgs:
    """Return an actor class with one worker per role; see ``RayWorkerGroup.spawn``.

    Raises ``ValueError`` if no role is given, or if two roles set an environment variable to
    different values.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls: class_dict is empty; it needs a role")
    roles: dict[str, RoleSpec] = {}
    env_vars: dict[str, str] = {}
    for role, spec in class_dict.items():
        differing = [
            key for key, value in spec.env_vars.items() if env_vars.get(key, value) != value
        ]
        # A process has one environment: the value of the last role would silently apply.
        if differing:
            raise ValueError(
                f"role {role!r} sets the environment variables {differing} to other values than "
                "the roles that share its process; fix: use equal values, or do not colocate it"
            )
        env_vars.update(spec.env_vars)
        roles[role] = spec.roles[SOLE_ROLE]
    return RayClassWithInitArgs.from_roles(roles, env_vars)
