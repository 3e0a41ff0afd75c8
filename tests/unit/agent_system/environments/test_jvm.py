"""JVMs: one per process, bounded, gone with their process whatever ends it; missing Java is said
before the start.
"""

import asyncio
import importlib.metadata
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.refusals import mentions

pytest.importorskip("textworld_express")

from agent_system.environments import jvm
from agent_system.environments.env import EnvFailure, WorkerStartError
from agent_system.environments.env_package.textworld_express.package import PACKAGE
from agent_system.environments.env_registry import MissingExtra, get_package
from agent_system.environments.manager import make_envs
from agent_system.environments.pool.environment_pool import EnvironmentPool
from tests.helpers.play import make_config

read = PACKAGE.read_settings

py4j = pytest.importorskip("py4j.protocol")
SECTION = {"game": "coin", "heap_mb": 128}
TASK = {
    "task_id": "coin/train/0",
    "data_source": "coin",
    "game": "coin",
    "params": "",
    "fold": "train",
    "number": 0,
}
GONE_S = 60  # a machine under load; what is asserted is that they go
java = pytest.mark.skipif(shutil.which("java") is None, reason="no Java")


def jvms_of(pid: int) -> list[int]:
    """Java processes started by process ``pid``."""
    found = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    return [
        int(line.split()[0]) for line in found.splitlines() if line.split()[1].startswith("java")
    ]


def gone(pid: int) -> bool:
    """Whether the process has ended; waits for it."""
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:
        try:
            if status_of(Path(f"/proc/{pid}")) == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def stop(pid: int) -> None:
    """Stop every thread of the process; on a busy machine one may still answer meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + GONE_S
    threads = Path(f"/proc/{pid}/task")
    while {status_of(thread) for thread in threads.iterdir()} != {"T"}:
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.01)


def status_of(process: Path) -> str:
    """The letter that Linux has for what a process or thread does."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


class pool_of:
    """A started pool that is closed at the end."""

    def __init__(self, placement: str) -> None:
        self.pool = EnvironmentPool(
            "textworld_express", SECTION, envs_per_worker=2, placement=placement
        )

    async def __aenter__(self) -> EnvironmentPool:
        return await self.pool.start()

    async def __aexit__(self, *error) -> None:
        await self.pool.close()


@java
def test_environments_of_a_process_share_one_bounded_jvm_that_ends_with_the_last():
    first: Any = PACKAGE.make(read(SECTION))
    second: Any = PACKAGE.make(read(SECTION))
    (pid,) = jvms_of(os.getpid())
    with open(f"/proc/{pid}/cmdline") as file:
        flags = file.read().split("\0")
    assert "-Xmx128m" in flags and "-XX:+ExitOnOutOfMemoryError" in flags
    first.close()
    assert second.reset(TASK).text
    second.close()
    second.close()  # twice is no harm
    assert gone(pid) and jvms_of(os.getpid()) == []


@java
def test_a_dead_jvm_is_replaced_for_the_next_environment():
    env: Any = PACKAGE.make(read(SECTION))
    start = env.reset(TASK)
    (pid,) = jvms_of(os.getpid())
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    with pytest.raises(py4j.Py4JError):
        env.step("inventory")
    env._jvm.process.wait()
    fresh: Any = PACKAGE.make(read(SECTION))
    assert fresh.reset(TASK) == start
    env.close()
    assert fresh.step("inventory")[0].text, "closing the dead one leaves the fresh one alone"
    fresh.close()


@java
def test_a_jvm_that_hangs_is_killed_at_the_deadline_and_replaced_for_all_on_it():

    async def play():
        async with pool_of("locked") as one:
            one.step_timeout_s = 1.0
            async with one.open_session() as hangs, one.open_session() as neighbour:
                start = await hangs.reset(TASK, 0)
                await neighbour.reset(TASK, 0)
                (pid,) = jvms_of(os.getpid())
                stop(pid)
                with pytest.raises(EnvFailure, check=mentions("1 s")):
                    await hangs.step("inventory")
                assert gone(pid)
                with pytest.raises(EnvFailure):
                    await neighbour.step("inventory")
                for env in (hangs, neighbour):
                    assert await env.reset(TASK, 0) == start
                    assert (await env.step("inventory"))[0].text
            return jvms_of(os.getpid())

    (pid,) = asyncio.run(play())
    assert gone(pid)


@java
@pytest.mark.parametrize("placement", ["locked", "process"])
def test_closing_the_pool_ends_its_jvm(placement):
    async def play():
        async with pool_of(placement) as one, one.open_session() as env:
            observation = await env.reset(TASK, 0)
            assert "coin" in observation.text
            return jvms_of(one.worker_pids[0] if placement == "process" else os.getpid())

    (pid,) = asyncio.run(play())
    assert gone(pid)


@java
def test_a_killed_worker_takes_its_jvm_along_and_is_replaced():

    async def play():
        async with pool_of("process") as one:
            (worker,) = one.worker_pids
            (java_pid,) = jvms_of(worker)
            async with one.open_session() as env:
                await env.reset(TASK, 0)
                os.kill(worker, signal.SIGKILL)
                with pytest.raises(EnvFailure):
                    await env.step("inventory")
            async with one.open_session() as env:
                await env.reset(TASK, 0)
                assert (await env.step("inventory"))[0].text
            return java_pid

    assert gone(asyncio.run(play()))


@java
def test_a_jvm_ends_by_itself_when_its_process_is_killed():
    """As when the kernel kills a worker, or Ray a collector: nobody is left to clean up."""
    code = (
        "import sys, time\n"
        "from agent_system.environments.env_package.textworld_express.package import PACKAGE\n"
        "env = PACKAGE.make(PACKAGE.read_settings({'game': 'coin'}))\n"
        "print(env._jvm.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert jvms_of(process.pid) == [pid]
    process.kill()
    process.wait()
    assert gone(pid)
    process.stdout.close()


def test_missing_java_is_said_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(jvm.JavaMissing, check=mentions("'textworld_express'", "Java 8")):
        make_envs(make_config("textworld_express", kwargs={}))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    with pytest.raises(jvm.JavaMissing, check=mentions("jdk/bin")):
        make_envs(make_config("textworld_express", kwargs={}))


def test_textworld_is_missed_without_importing_it(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(MissingExtra, check=mentions("'textworld'", ".[envs]")):
        make_envs(make_config("textworld", kwargs={}))


@pytest.mark.parametrize("name", ["textworld_express", "scienceworld", "textarena"])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, name):
    get_package(name)
    for module in [found for found in sys.modules if found.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingExtra, match=rf"'{name}' needs the module '{name}', which is not .*\.\[envs\]"
    ):
        make_envs(make_config(name, kwargs={}))


def test_a_java_that_does_not_start_is_quoted(monkeypatch, tmp_path):
    script = tmp_path / "bin" / "java"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho 'there is no room for a heap' >&2\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(jvm.JavaMissing, check=mentions("-Xmx128m", "there is no room for a heap")):
        PACKAGE.make(read(SECTION))

    async def start():
        async with pool_of("process"):
            pass

    with pytest.raises(WorkerStartError, match="there is no room for a heap"):
        asyncio.run(start())
