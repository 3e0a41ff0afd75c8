"""WorkerHost: the one actor class that all groups run. It sets the environment up and then houses
worker objects.

This module imports nothing heavy, so that ``prepare`` takes effect before torch is loaded by a
worker's module.
"""

import asyncio
import inspect
import os
import socket
import sys
from typing import Any

from verl.utils.logging import setup_logging
from verl.utils.stacks import answer_with_stacks

LISTEN_FD = "VERL_MASTER_LISTEN_FD"


class WorkerHost:
    """One rank's process: environment first, then a worker object per role, then their methods.

    Coroutine methods run on one event loop, which is the same for all calls: what one of them opens
    (a session, a lock) serves the next. It stands still between calls.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def describe(self) -> dict[str, Any]:
        """Where this process runs: ``node_id``, ``ip``, ``pid``."""
        import ray

        context = ray.get_runtime_context()
        return {
            "node_id": context.get_node_id(),
            "ip": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
        }

    def listen(self) -> tuple[str, int]:
        """Bind the rendezvous socket on this node's address alone and keep it; returns (address,
        port).
        """
        import ray

        address = ray.util.get_node_ip_address()
        # Kept open until rank 0 takes it over: a port that is only chosen may be gone by then.
        listener = socket.create_server((address, 0), backlog=512)
        port = listener.getsockname()[1]
        os.environ[LISTEN_FD] = str(listener.detach())
        return address, port

    def prepare(self, env: dict[str, str], import_path: list[str]) -> None:
        """Set environment variables and make importable what the driver can import.

        Has to come before ``start``, whose arguments import the workers' modules.
        """
        os.environ.update(env)
        # Behind what this process has: its own packages keep their precedence.
        sys.path.extend(entry for entry in import_path if entry not in sys.path)

    def start(self, role: str, worker_cls: type, args: tuple, kwargs: dict[str, Any]) -> None:
        """Construct the worker of ``role`` in this process."""
        setup_logging(level="WARNING")
        answer_with_stacks(f"{worker_cls.__name__}[rank {os.environ.get('RANK', 0)}]")
        self._workers[role] = worker_cls(*args, **kwargs)

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> Any:
        """Call ``method`` of the worker of ``role``; what a coroutine method returns is awaited."""
        return self._awaited(getattr(self._workers[role], method)(*args, **kwargs))

    def _awaited(self, answer: Any) -> Any:
        if not inspect.iscoroutine(answer):
            return answer
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(answer)

    def close(self) -> None:
        """Close the workers and leave the process group, if one was joined."""
        for worker in self._workers.values():
            if hasattr(worker, "close"):
                self._awaited(worker.close())
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
