"""Worker: base class of the objects that run as one rank of a worker group."""

import os
from datetime import timedelta
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register

# File descriptor of the listening socket for the rendezvous, in rank 0's process. WorkerHost sets
# it and repeats the name, because that module must not import this one.
LISTEN_FD = "VERL_MASTER_LISTEN_FD"


class Worker:
    """One rank of a group.

    The environment variables ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT`` are set before the constructor runs. Outside of a group, the
    worker is a group of one.
    """

    @property
    def rank(self) -> int:
        """Number of this worker in the group, from 0."""
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        """Number of this worker among the group's workers on the same node, from 0."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def device(self) -> Any:
        """The ``torch.device`` of this rank: its CUDA device if it has one, else the CPU."""
        import torch

        if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
            return torch.device("cpu")
        # A Ray actor usually sees only its assigned device, as number 0.
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_process_group(self, backend: str | None = None, timeout_s: float = 600.0) -> None:
        """Join the default ``torch.distributed`` process group; every rank has to call this.

        ``backend`` None means ``nccl`` if the rank has a CUDA device, else ``gloo``. Workers in one
        process share the process group, so a second call only checks the backend. ``timeout_s``
        limits the rendezvous and each collective. Raises ``RuntimeError`` if a group with another
        backend exists.
        """
        import torch
        import torch.distributed as dist

        device = self.device
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        if dist.is_initialized():
            # Compare the configurations: "gloo" and "cpu:gloo,cuda:gloo" are the same.
            requested = dist.Backend(backend)
            requested_config = dist.BackendConfig(requested)  # pyright: ignore[reportArgumentType]  a Backend
            if dist.get_backend_config() != str(requested_config):
                raise RuntimeError(
                    "the process group of this process has the backend "
                    f"{dist.get_backend_config()}, not {backend}, which was requested"
                )
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_s)
        store = self._create_store(timeout)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )

    def _create_store(self, timeout: timedelta) -> Any:
        import torch.distributed as dist

        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = int(os.environ.get("MASTER_PORT", "0"))
        listen_fd = os.environ.pop(LISTEN_FD, None) if self.rank == 0 else None
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  torch documents it
            address,
            port,
            world_size=self.world_size,
            is_master=self.rank == 0,
            timeout=timeout,
            # The socket was bound before its port was announced, so no other process has the port.
            master_listen_fd=int(listen_fd) if listen_fd is not None else None,
        )

    def close(self) -> None:
        """Release resources. Override it: it is called once before a regular shutdown."""
