"""Tests of the JVMs of environments.

A process has one JVM of bounded memory, which ends with the process. Missing Java is reported
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
from verl.config.settings.errors import get_problem_code

pytest.importorskip("textworld_express")

from agent_system.environments import jvm
from agent_system.environments.env import EnvFailure, WorkerStartError
from agent_system.environments.env_package.textworld_express.package import PACKAGE
from agent_system.environments.env_registry import MissingExtraError, get_package
from agent_system.environments.manager import make_envs
from agent_system.environments.pool.environment_pool import EnvironmentPool
from tests.helpers.number_line_world import make_config

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
END_TIMEOUT_S = 60  # generous, since the machine may be under load
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="no Java")


def list_jvms(pid: int) -> list[int]:
    """Return the Java processes that process ``pid`` started."""
    listing = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    return [
        int(line.split()[0]) for line in listing.splitlines() if line.split()[1].startswith("java")
    ]


def wait_until_ended(pid: int) -> bool:
    """Wait for the end of the process and return whether it has ended."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if read_status(Path(f"/proc/{pid}")) == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def stop_process(pid: int) -> None:
    """Stop the process and wait until every one of its threads is stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + END_TIMEOUT_S
    threads = Path(f"/proc/{pid}/task")
    while {read_status(thread) for thread in threads.iterdir()} != {"T"}:
        assert time.monotonic() < deadline, "a thread does not stop"
        time.sleep(0.01)


def read_status(process: Path) -> str:
    """Return the state letter of a process or thread in ``/proc``."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


class OpenPool:
    """Context of a started pool, which is closed at the end."""

    def __init__(self, placement: str) -> None:
        self.pool = EnvironmentPool(
            "textworld_express", SECTION, envs_per_worker=2, placement=placement
        )

    async def __aenter__(self) -> EnvironmentPool:
        return await self.pool.start()

    async def __aexit__(self, *error) -> None:
        await self.pool.close()


@needs_java
def test_environments_share_one_jvm_that_ends_with_the_last():
    first: Any = PACKAGE.make(read(SECTION))
    second: Any = PACKAGE.make(read(SECTION))
    (pid,) = list_jvms(os.getpid())
    with open(f"/proc/{pid}/cmdline") as file:
        flags = file.read().split("\0")
    assert "-Xmx128m" in flags and "-XX:+ExitOnOutOfMemoryError" in flags
    first.close()
    assert second.reset(TASK).text
    second.close()
    second.close()  # closing twice is allowed
    assert wait_until_ended(pid) and list_jvms(os.getpid()) == []


@needs_java
def test_dead_jvm_is_replaced_for_the_next_environment():
    env: Any = PACKAGE.make(read(SECTION))
    start = env.reset(TASK)
    (pid,) = list_jvms(os.getpid())
    os.kill(pid, signal.SIGKILL)
    assert wait_until_ended(pid)
    with pytest.raises(py4j.Py4JError):
        env.step("inventory")
    env._jvm.process.wait()
    fresh: Any = PACKAGE.make(read(SECTION))
    assert fresh.reset(TASK) == start
    env.close()
    assert fresh.step("inventory")[0].text, "closing the dead environment leaves the new one alone"
    fresh.close()


@needs_java
def test_stalled_jvm_is_killed_at_the_deadline_and_replaced():

    async def run_pool():
        async with OpenPool("locked") as pool:
            pool.step_timeout_s = 1.0
            async with pool.open_session() as stalled, pool.open_session() as neighbour:
                first_observation = await stalled.reset(TASK, 0)
                await neighbour.reset(TASK, 0)
                (pid,) = list_jvms(os.getpid())
                stop_process(pid)
                with pytest.raises(EnvFailure, check=mentions("1 s")):
                    await stalled.step("inventory")
                assert wait_until_ended(pid)
                with pytest.raises(EnvFailure):
                    await neighbour.step("inventory")
                for env in (stalled, neighbour):
                    assert await env.reset(TASK, 0) == first_observation
                    assert (await env.step("inventory"))[0].text
            return list_jvms(os.getpid())

    (pid,) = asyncio.run(run_pool())
    assert wait_until_ended(pid)


@needs_java
@pytest.mark.parametrize("placement", ["locked", "process"])
def test_closing_the_pool_ends_its_jvm(placement):
    async def run_pool():
        async with OpenPool(placement) as pool, pool.open_session() as env:
            observation = await env.reset(TASK, 0)
            assert "coin" in observation.text
            return list_jvms(pool.worker_pids[0] if placement == "process" else os.getpid())

    (pid,) = asyncio.run(run_pool())
    assert wait_until_ended(pid)


@needs_java
def test_jvm_of_a_killed_worker_ends_and_the_worker_is_replaced():

    async def run_pool():
        async with OpenPool("process") as pool:
            (worker,) = pool.worker_pids
            (java_pid,) = list_jvms(worker)
            async with pool.open_session() as env:
                await env.reset(TASK, 0)
                os.kill(worker, signal.SIGKILL)
                with pytest.raises(EnvFailure):
                    await env.step("inventory")
            async with pool.open_session() as env:
                await env.reset(TASK, 0)
                assert (await env.step("inventory"))[0].text
            return java_pid

    assert wait_until_ended(asyncio.run(run_pool()))


@needs_java
def test_jvm_ends_when_its_process_is_killed():
    """No Python code runs after SIGKILL, so the JVM has to notice the end itself."""
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
    assert list_jvms(process.pid) == [pid]
    process.kill()
    process.wait()
    assert wait_until_ended(pid)
    process.stdout.close()


def test_missing_java_is_reported_before_the_start(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = mentions("'textworld_express'", "Java 8")
    with pytest.raises(jvm.JavaMissingError, check=refused) as caught:
        make_envs(make_config("textworld_express", kwargs={}))
    assert get_problem_code(caught.value, "no_rows") == "missing_package"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    with pytest.raises(jvm.JavaMissingError, check=mentions("jdk/bin")):
        make_envs(make_config("textworld_express", kwargs={}))


def test_missing_textworld_is_reported_without_an_import(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(MissingExtraError, check=mentions("'textworld'", ".[envs]")):
        make_envs(make_config("textworld", kwargs={}))


@pytest.mark.parametrize("name", ["textworld_express", "scienceworld", "textarena"])
def test_missing_library_is_named_with_its_extra(monkeypatch, name):
    get_package(name)
    for module in [imported for imported in sys.modules if imported.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, check=mentions(f"'{name}'", ".[envs]")):
        make_envs(make_config(name, kwargs={}))


def test_output_of_a_failing_java_is_quoted(monkeypatch, tmp_path):
    script = tmp_path / "bin" / "java"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho 'could not reserve the heap' >&2\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(
        jvm.JavaMissingError, check=mentions("-Xmx128m", "could not reserve the heap")
    ):
        PACKAGE.make(read(SECTION))

    async def start():
        async with OpenPool("process"):
            pass

    with pytest.raises(WorkerStartError, match="could not reserve the heap"):
        asyncio.run(start())
