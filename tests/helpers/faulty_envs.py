"""Environment packages that fail on request of the action or the task."""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np

from agent_system.environments.env import Observation
from agent_system.environments.env_package.number_line import package as number_line
from agent_system.environments.env_package.number_line.package import NumberLineEnv
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from verl.config.settings import NonNegative
from verl.utils.limits import TimeLimitError


def fail():
    raise ValueError("the environment broke")


def time_out():
    raise TimeoutError("the environment's own")


def noise():
    """Write bytes that are no reply into every socket of the process."""
    for fd in [int(entry) for entry in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, b"this is no reply\n")


def exceed_limit():
    raise TimeLimitError("grading t took over 1 s")


DEEDS = {
    "hang": lambda: time.sleep(3600),
    "raise": fail,
    "time out": time_out,
    "exceed": exceed_limit,
    "leave": lambda: sys.exit(3),
    "run dry": lambda: next(iter(())),
    "kill": lambda: os.kill(os.getpid(), 9),
    "exit": lambda: os._exit(3),
    "noise": noise,
    "print": lambda: print("printed by the environment", flush=True),
}
NO_TEXT: Any = [1, 2]
NO_PROMPTS: Any = None
RETURNS = {
    "none": None,
    "nan": (Observation("x"), float("nan"), False, {}),
    "unsendable": (Observation("x"), 0.0, False, {"score": object()}),
    "half a character": (Observation("bad \ud83d"), 0.0, False, {}),
    "anchor": (Observation("x", anchor=NO_TEXT), 0.0, False, {}),
    "actions": (Observation("x", info={"admissible_actions": [1, 2]}), 0.0, False, {}),
    "won": (Observation("x"), 0.0, False, {"won": "no"}),
}


class FaultySettings(EnvSettings):
    """Faults in the creation of the environment."""

    start_s: NonNegative = 0.0
    """seconds that the creation takes"""
    fail_start: bool = False
    """True if the creation fails"""
    missing: bool = False
    """True if a required module is not installed"""


class FaultyEnv:
    """Counts its steps. An action in ``DEEDS`` or ``RETURNS``, or ``child``, causes a fault."""

    placement = "process"

    def __init__(self, settings):
        self.steps = 0
        time.sleep(settings.start_s)
        if settings.fail_start:
            raise OSError("no such engine")
        if settings.missing:
            raise ModuleNotFoundError("No module named 'no_such_engine'", name="no_such_engine")

    def reset(self, task, seed) -> Any:
        self.steps = 0
        self._misbehave(task.get("fault", ""))
        return Observation(
            f"start {task['task_id']} {seed} pid {os.getpid()}", info={"env": id(self)}
        )

    def step(self, action) -> Any:
        self.steps += 1
        bad = self._misbehave(action)
        if bad is not None:
            return bad[0]
        return (
            Observation(f"step {self.steps}"),
            0.5,
            False,
            {"won": False, "is_action_valid": True},
        )

    def _misbehave(self, fault):
        if fault in RETURNS:
            return (RETURNS[fault],)
        if fault in DEEDS:
            DEEDS[fault]()
        if fault == "child":
            child = subprocess.Popen(["sleep", "3600"])
            return ((Observation("child"), 0.0, False, {"won": False, "child": child.pid}),)
        return None

    def close(self):
        pass


class LocalFaultyEnv(FaultyEnv):
    """Version for placements inside the caller's process: a hang ends after a second."""

    def _misbehave(self, fault):
        if fault == "hang":
            time.sleep(1.0)
            return None
        return super()._misbehave(fault)


class AsyncEnv(FaultyEnv):
    """Version with coroutines; during ``sleep`` the other environments of the process run."""

    async def reset(self, task, seed) -> Any:
        return FaultyEnv.reset(self, task, seed)

    async def step(self, action) -> Any:
        if action == "sleep":
            await asyncio.sleep(0.3)
        if action == "hang":
            await asyncio.sleep(3600)
        return FaultyEnv.step(self, action)


class EchoClient:
    """Client with a task that answers requests. It is bound to the event loop that started it."""

    async def start(self):
        self.requests, self.replies = asyncio.Queue(), asyncio.Queue()
        self.task = asyncio.create_task(self.answer())

    async def answer(self):
        while True:
            await self.replies.put(f"{await self.requests.get()}!")

    async def ask(self, text):
        await self.requests.put(text)
        return await asyncio.wait_for(self.replies.get(), 10)


class ClientEnv(FaultyEnv):
    """Keeps a client over all episodes. A step returns the reply of the client."""

    client = None

    async def reset(self, task, seed) -> Any:
        if self.client is None:
            self.client = EchoClient()
            await self.client.start()
        return super().reset(task, seed)

    async def step(self, action) -> Any:
        assert self.client is not None
        return Observation(await self.client.ask(action)), 0.0, False, {}


class SlowEnv(FaultyEnv):
    """Each step takes a tenth of a second, and a nap takes longer."""

    def step(self, action):
        time.sleep(0.5 if action == "nap" else 0.1)
        return super().step(action)


class OverlapEnv(FaultyEnv):
    """Reports if another instance runs a step at the same time. The action ``hang`` waits for
    ``go_on``.
    """

    inside = threading.Semaphore(1)
    go_on = threading.Event()
    steps_begun = 0
    closed = 0

    def step(self, action):
        OverlapEnv.steps_begun += 1
        alone = self.inside.acquire(blocking=False)
        time.sleep(0.05)
        if action == "hang":
            self.go_on.wait()
        if alone:
            self.inside.release()
        return Observation("x"), 0.0, False, {"overlap": not alone}

    def close(self):
        OverlapEnv.closed += 1


class ImageEnv(FaultyEnv):
    """Returns an image and numpy numbers."""

    def reset(self, task, seed):
        image = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
        return Observation("an image", image=image, info={"score": np.int64(7)})


class FaultyLine(NumberLineEnv):
    """Number line in a worker process that fails as its action says."""

    placement = "process"

    def step(self, action):
        if action in RETURNS:
            return RETURNS[action]
        DEEDS.get(action, lambda: None)()
        return super().step(action)


def tasks(settings, split):
    """Return four tasks per split."""
    return [{"task_id": f"{split}-{i}", "data_source": "faulty"} for i in range(4)]


def package(make):
    """Return a package around ``make`` whose prompts are not used."""
    return EnvPackage(
        name="faulty",
        settings=FaultySettings,
        make=make,
        tasks=tasks,
        prompts=lambda settings: NO_PROMPTS,
        project=lambda text: (text, True),
    )


PACKAGE = package(FaultyEnv)
LOCAL = package(LocalFaultyEnv)
ASYNC = package(AsyncEnv)
CLIENT = package(ClientEnv)
SLOW = package(SlowEnv)
OVERLAP = package(OverlapEnv)
IMAGE = package(ImageEnv)
LINE = replace(number_line.PACKAGE, name="faulty_line", make=FaultyLine)
