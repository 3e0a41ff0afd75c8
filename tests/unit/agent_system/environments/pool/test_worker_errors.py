"""Tests of the errors that an environment worker reports."""

import asyncio
import socket

import pytest

from agent_system.environments import Observation
from agent_system.environments.env import EnvFailure
from agent_system.environments.pool import wire
from agent_system.environments.pool.environment_pool import EnvironmentPool
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


class Leaving:
    def reset(self, task, seed):
        raise SystemExit(0)


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
