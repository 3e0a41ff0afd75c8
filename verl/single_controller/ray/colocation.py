"""Several roles in one process: one device context, and one start, for both.

both = create_colocated_worker_cls({"actor": RayClassWithInitArgs(ActorWorker, config),
                                    "ref": RayClassWithInitArgs(ActorWorker, config, role="ref")})
groups = RayWorkerGroup(pool, both).spawn(["actor", "ref"])   # two groups, the same processes
"""

from collections.abc import Mapping

from verl.single_controller.ray.worker_group import SOLE_ROLE, RayClassWithInitArgs, RoleSpec


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> RayClassWithInitArgs:
    """One actor class that houses a worker of every role; see ``RayWorkerGroup.spawn``.

    Raises ``ValueError`` when no role is given or two roles set an environment variable
    differently.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls: no roles")
    roles: dict[str, RoleSpec] = {}
    env_vars: dict[str, str] = {}
    for role, spec in class_dict.items():
        differing = [
            key for key, value in spec.env_vars.items() if env_vars.get(key, value) != value
        ]
        # One process has one environment: the role that comes last would silently win.
        if differing:
            raise ValueError(
                f"role {role!r} sets {differing} otherwise than the roles it shares a process with"
            )
        env_vars.update(spec.env_vars)
        roles[role] = spec.roles[SOLE_ROLE]
    return RayClassWithInitArgs.of_roles(roles, env_vars)
