"""WorkerHost: the Ray actor class of all worker groups.

It sets environment variables and then creates the workers. This module imports no torch, so that
``set_environment`` takes effect before a worker's module imports torch.
"""

import asyncio
import inspect
import os
import socket
import sys
from typing import Any

import psutil

from verl.names import LISTEN_FD_VARIABLE
from verl.utils.logging import setup_logging
from verl.utils.stacks import install_stack_dump_handler

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # environment variable: network interface that Gloo uses


class WorkerHost:
    """Process of one rank, which has one worker per role.

    The group calls ``set_environment`` first, then ``start`` for each role, then ``call``.
    Coroutine methods of all calls run on the same event loop, so they can share a session or a
    lock. The loop does not run between calls.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def describe_location(self) -> dict[str, Any]:
        """Return a dict with ``node_id``, ``ip``, ``interface`` and ``pid`` of this process.

        ``interface`` is the network interface with the address ``ip``. It is empty if there is
        none, or if the environment selects an interface for Gloo.
        """
        import ray

        context = ray.get_runtime_context()
        ip = ray.util.get_node_ip_address()
        return {
            "node_id": context.get_node_id(),
            "ip": ip,
            "interface": "" if GLOO_INTERFACE in os.environ else find_network_interface(ip),
            "pid": os.getpid(),
        }

    def open_rendezvous_socket(self) -> tuple[str, int]:
        """Open torch.distributed's rendezvous socket on this node and return (address, port)."""
        import ray

        address = ray.util.get_node_ip_address()
        # Keep the socket open until rank 0 uses it: another process could take a port that is free.
        listener = socket.create_server((address, 0), backlog=512)
        port = listener.getsockname()[1]
        os.environ[LISTEN_FD_VARIABLE] = str(listener.detach())
        return address, port

    def set_environment(self, env: dict[str, str], import_path: list[str]) -> None:
        """Set environment variables and ``sys.path``, before the workers' modules are imported."""
        os.environ.update(env)
        # Append the paths, so that packages already on sys.path have precedence.
        sys.path.extend(path for path in import_path if path not in sys.path)

    def start(self, role: str, worker_cls: type, args: tuple, kwargs: dict[str, Any]) -> None:
        """Construct the worker of ``role`` in this process."""
        setup_logging(level="WARNING")
        install_stack_dump_handler(f"{worker_cls.__name__}[rank {os.environ.get('RANK', 0)}]")
        self._workers[role] = worker_cls(*args, **kwargs)

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> Any:
        """Call ``method`` of the worker of ``role``; await the result if it is a coroutine."""
        return self._await_result(getattr(self._workers[role], method)(*args, **kwargs))

    def _await_result(self, result: object) -> Any:
        if not inspect.iscoroutine(result):
            return result
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(result)

    def close(self) -> None:
        """Close the workers, and destroy the ``torch.distributed`` process group if it exists."""
        for worker in self._workers.values():
            if hasattr(worker, "close"):
                self._await_result(worker.close())
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def find_network_interface(address: str) -> str:
    """Return the name of the network interface of this node with ``address``, "" if none has it."""
    interfaces = psutil.net_if_addrs().items()
    return next(
        (
            name
            for name, addresses in interfaces
            if address in {entry.address for entry in addresses}
        ),
        "",
    )
