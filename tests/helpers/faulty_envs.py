"""Environment packages that misbehave on demand: the action or the task says how."""

import asyncio
import contextlib
import os
import stat
import subprocess
import threading
import time

import numpy as np

from agent_system.environments.base import EnvPackage, Observation


def fail():
    raise ValueError("the environment broke")


def noise():
    """Write into every socket of the process what is no reply."""
    for fd in [int(entry) for entry in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, b"this is no reply\n")


DEEDS = {
    "hang": lambda: time.sleep(3600),
    "raise": fail,
    "kill": lambda: os.kill(os.getpid(), 9),
    "exit": lambda: os._exit(3),
    "noise": noise,
    "print": lambda: print("printed by the environment", flush=True),
}
RETURNS = {
    "none": None,
    "nan": (Observation("x"), float("nan"), False, {}),
    "unsendable": (Observation("x"), 0.0, False, {"won": object()}),
}


class FaultyEnv:
    """Counts its steps; an action named in ``DEEDS`` or ``RETURNS``, or ``child``, misbehaves."""

    placement = "process"

    def __init__(self, section):
        self.section = section
        self.steps = 0
        time.sleep(section.get("start_s", 0))
        if section.get("fail_start"):
            raise OSError("no such engine")
        if section.get("missing"):
            raise ModuleNotFoundError("No module named 'no_such_engine'", name="no_such_engine")

    def reset(self, task, seed):
        self.steps = 0
        self._misbehave(task.get("fault", ""))
        return Observation(f"start {task['task_id']} {seed} pid {os.getpid()}", info={"env": id(self)})

    def step(self, action):
        self.steps += 1
        bad = self._misbehave(action)
        if bad is not None:
            return bad[0]
        return Observation(f"step {self.steps}"), 0.5, False, {"won": False, "is_action_valid": True}

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
    """The same for placements inside the caller's process: a hang ends after a second."""

    def _misbehave(self, fault):
        if fault == "hang":
            time.sleep(1.0)
            return None
        return super()._misbehave(fault)


class AsyncEnv(FaultyEnv):
    """Coroutines; ``sleep`` lets the others of the process play on."""

    async def reset(self, task, seed):
        return FaultyEnv.reset(self, task, seed)

    async def step(self, action):
        if action == "sleep":
            await asyncio.sleep(0.3)
        if action == "hang":
            await asyncio.sleep(3600)
        return FaultyEnv.step(self, action)


class SlowEnv(FaultyEnv):
    """Every step takes a tenth of a second, a nap longer."""

    def step(self, action):
        time.sleep(0.5 if action == "nap" else 0.1)
        return super().step(action)


class OverlapEnv(FaultyEnv):
    """Tells whether another instance was being stepped at the same time."""

    inside = threading.Semaphore(1)

    def step(self, action):
        alone = self.inside.acquire(blocking=False)
        time.sleep(0.05)
        if alone:
            self.inside.release()
        return Observation("x"), 0.0, False, {"overlap": not alone}


class ImageEnv(FaultyEnv):
    """Returns an image and numpy numbers."""

    def reset(self, task, seed):
        image = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
        return Observation("an image", image=image, info={"score": np.int64(7)})


def tasks(section, split):
    """Four tasks per split."""
    return [{"task_id": f"{split}-{i}", "data_source": "faulty"} for i in range(4)]


def package(make):
    """A package around ``make`` whose prompts nobody asks for."""
    return EnvPackage("faulty", make, tasks, lambda section: None, lambda text: (text, True))


PACKAGE = package(FaultyEnv)
LOCAL = package(LocalFaultyEnv)
ASYNC = package(AsyncEnv)
SLOW = package(SlowEnv)
OVERLAP = package(OverlapEnv)
IMAGE = package(ImageEnv)
