"""Worker: the base class of everything that runs as one rank of a group."""

import os
from datetime import timedelta
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register

# A listening socket that rank 0's process holds for the rendezvous. WorkerHost sets it, and repeats
# the name: that module has to stay free of imports.
LISTEN_FD = "VERL_MASTER_LISTEN_FD"


class Worker:
    """One rank of a group.

    Before the constructor runs, the environment holds ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. Outside a group they default to a
    group of one.
    """

    @property
    def rank(self) -> int:
        """This worker's number in the group, from 0."""
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        """This worker's number among the group's workers on the same node."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def device(self) -> Any:
        """The ``torch.device`` this rank computes on: its CUDA device where it was given one, else
        the CPU.
        """
        import torch

        if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
            return torch.device("cpu")
        # a Ray actor usually sees its own device alone, as number 0
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_process_group(self, backend: str | None = None, timeout_s: float = 600.0) -> None:
        """Join the group's ``torch.distributed`` default process group; every rank has to call it.

        ``backend`` None means ``nccl`` where the rank has a CUDA device and ``gloo`` elsewhere.
        Workers that share a process share its group, so a second call only checks that it asks for
        the same backend. ``timeout_s`` bounds the rendezvous and each collective. Raises
        ``RuntimeError`` when a group with another backend exists.
        """
        import torch
        import torch.distributed as dist

        device = self.device
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        if dist.is_initialized():
            # Compared as configurations: "gloo" and "cpu:gloo,cuda:gloo" are the same.
            asked = dist.Backend(backend)
            wanted = dist.BackendConfig(asked)  # pyright: ignore[reportArgumentType]  a Backend
            if dist.get_backend_config() != str(wanted):
                raise RuntimeError(
                    f"the process group runs {dist.get_backend_config()}, not {backend}"
                )
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_s)
        store = self._rendezvous(timeout)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )

    def _rendezvous(self, timeout: timedelta) -> Any:
        import torch.distributed as dist

        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = int(os.environ.get("MASTER_PORT", "0"))
        held = os.environ.pop(LISTEN_FD, None) if self.rank == 0 else None
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  torch documents it
            address,
            port,
            world_size=self.world_size,
            is_master=self.rank == 0,
            timeout=timeout,
            # the socket was bound when its port was announced: nobody else can have taken the port
            # since
            master_listen_fd=int(held) if held is not None else None,
        )

    def close(self) -> None:
        """Called once before the group is shut down in good order; override to release what the
        worker holds.
        """
