"""Processes of a test that are ranks of a group."""

import os

import torch


def become_rank(number: int, port: int) -> None:
    """Make this process rank ``number`` of two that meet at ``port`` of the loopback, on a thread
    of its own.
    """
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
