"""Tests of the errors that an environment worker reports."""

import asyncio
import socket

import pytest

from agent_system.environments import Observation
from agent_system.environments.env import EnvFailure
from agent_system.environments.pool import wire
from agent_system.environments.pool.environment_pool import EnvironmentPool
from agent_system.environments.pool.threads import LocalSlot
from agent_system.environments.pool.worker import EnvironmentHost, serve_blocking, start_host
from tests.helpers.faulty_envs import PACKAGE as FAULTY_PACKAGE
from verl.config.settings import secret_values

PACKAGE = """
def refuse(**settings):
    raise ValueError(f"refused with {settings} and sk-abcdefgh")

PACKAGE = refuse(api_key="sk-abcdefgh", size=3)
"""


def test_start_error_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(secret_values, "_registered_secrets", set())
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "refuses_settings.py").write_text(PACKAGE)
    section = {"kwargs": {"api_key": "sk-abcdefgh"}}
    start_message = {"target": "refuses_settings:PACKAGE", "section": section, "sys_path": []}
    host, line = start_host(start_message)
    reported_error = wire.decode(line)["failed"]
    assert host is None and "refused with" in reported_error and "sk-abcdefgh" not in reported_error


@pytest.mark.parametrize("placement", ["inline", "thread"])
@pytest.mark.parametrize(("action", "kind"), [("exceed", "timeout"), ("raise", "error")])
def test_time_limit_in_a_call_counts_as_timeout(placement, action, kind):
    async def run_step():
        path = "tests.helpers.faulty_envs:PACKAGE"
        async with (
            EnvironmentPool(path, None, 1, 1, 20.0, 20.0, placement=placement) as pool,
            pool.open_session() as env,
        ):
            await env.reset({"task_id": "t", "data_source": "faulty"}, 0)
            await env.step(action)

    with pytest.raises(EnvFailure) as failure:
        asyncio.run(run_step())
    assert failure.value.kind == kind


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_helper", "ModuleNotFoundError"),
        ("exit(0)", "SystemExit"),
        ("score = 1", "did you mean"),
    ],
)
def test_reward_file_that_cannot_be_loaded_is_named(tmp_path, text, reason):
    """The message names the key and the fix. It is not that of a missing extra."""
    path = tmp_path / "grade.py"
    path.write_text(text)
    section = {"train_files": ["a.jsonl"], "reward": {"path": str(path), "name": "scores"}}
    target = "agent_system.environments.env_package.dataset.package:PACKAGE"
    host, line = start_host({"target": target, "section": section, "sys_path": []})
    reply = wire.decode(line)
    assert host is None and reply["missing"] is None and "Traceback" not in reply["failed"]
    assert reply["failed"].startswith("custom_reward_function.") and reason in reply["failed"]


class Leaving(tuple):
    """Environment, and result of a step, whose methods raise ``SystemExit``."""

    def raise_exit(self, *args):
        raise SystemExit(0)

    reset = step = close = __iter__ = raise_exit


class LeavingResult(Leaving):
    def step(self, action):
        return Leaving([Observation("text"), 0.0, False, {}])


def test_exit_of_an_environment_fails_its_call_only():
    host = EnvironmentHost(FAULTY_PACKAGE, {})
    host.envs[0] = Leaving()  # pyright: ignore[reportArgumentType]
    ours, channel = socket.socketpair()
    call = {"op": "reset", "task": {"task_id": "a"}, "seed": 0}
    lines = [wire.encode({**call, "id": number, "slot": number}) for number in (0, 1)]
    with ours, channel:
        serve_blocking(channel, lines, host)
        replies = [wire.decode(line) for line in ours.recv(100_000).splitlines()]
    assert replies[0]["error"] == "error" and "SystemExit" in replies[0]["detail"]
    assert "ok" in replies[1]


@pytest.mark.parametrize("placement", ["inline", "thread", "locked"])
@pytest.mark.parametrize("method", ["reset", "step"])
def test_exit_of_an_environment_in_this_process_fails_its_call_only(placement, method):
    async def make_call():
        slot = LocalSlot(FAULTY_PACKAGE, {}, placement)
        slot._envs.append(Leaving())  # pyright: ignore[reportArgumentType]
        with pytest.raises(EnvFailure) as failure:
            await slot.call(method, {"task": {"task_id": "a"}, "seed": 0, "action": "left"}, 20.0)
        await slot.call("reset", {"task": {"task_id": "a"}, "seed": 0}, 20.0)
        await slot.close()
        return failure.value

    failure = asyncio.run(make_call())
    assert failure.kind == "error" and "SystemExit" in str(failure)


def test_exit_while_a_result_is_read_is_an_error_reply():
    host = EnvironmentHost(FAULTY_PACKAGE, {})
    host.envs[0] = LeavingResult()  # pyright: ignore[reportArgumentType]
    call = {"id": 1, "op": "step", "slot": 0, "action": "left"}
    reply = wire.decode(host.encode_result(call, host.start_call(call)))
    assert reply["error"] == "garbage" and "SystemExit" in reply["detail"]
    assert 0 not in host.envs


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "result",
    [
        (Observation("x"), 10**400, False, {}),
        (Observation("x"), Unprintable(), False, {}),
        (Observation("x", opening=["be kind"]), 0.0, False, {}),  # pyright: ignore[reportArgumentType]
        (Observation("x"), 0.0, False, {"won": 10**400}),
    ],
)
def test_invalid_return_value_fails_its_call_only(result):
    host = EnvironmentHost(FAULTY_PACKAGE, {})
    reply = wire.decode(host.encode_result({"id": 1, "op": "step", "slot": 0}, result))
    assert reply["id"] == 1 and reply["error"] == "garbage"
