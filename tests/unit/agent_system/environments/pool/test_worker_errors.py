"""Tests of the errors that an environment worker reports."""

import asyncio

import pytest

from agent_system.environments import Observation
from agent_system.environments.env import EnvFailure
from agent_system.environments.pool import wire
from agent_system.environments.pool.environment_pool import EnvironmentPool
from agent_system.environments.pool.worker import EnvironmentHost, start_host
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
