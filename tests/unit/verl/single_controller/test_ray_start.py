"""Start of a local Ray on a machine whose CPUs are used by other processes."""

import os

import pytest
import ray

from verl.single_controller.ray import local

RAY_MESSAGES = (
    "The current node timed out during startup. This could happen because",
    "System error: Failed to connect to GCS. Please check if the GCS server is running",
)


def start_with_errors(monkeypatch, errors):
    """Call ``init_ray`` while the first calls of ``ray.init`` raise ``errors``.

    Return a list with "start" for every call of ``ray.init`` and "stop" for every call of
    ``stop_ray``.
    """
    calls = []
    remaining = list(errors)

    def fail_at_first(**arguments):
        # All attempts must mark their processes, so that stop_ray finds them.
        assert arguments["address"] == "local" and local.RAY_OWNER in os.environ
        calls.append("start")
        if remaining:
            raise remaining.pop(0)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail_at_first)
    monkeypatch.setattr(local, "stop_ray", lambda: calls.append("stop"))
    monkeypatch.setattr(local, "_prepare_local_start", _mark_processes)
    monkeypatch.setattr(local, "_collect_ray_facts", lambda *_, **__: {})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        local.init_ray()
    finally:
        assert local.RAY_OWNER not in os.environ
    return calls


def _mark_processes(_options):
    os.environ[local.RAY_OWNER] = str(os.getpid())
    return {}


@pytest.mark.parametrize("message", RAY_MESSAGES)
def test_slow_start_is_repeated_once(monkeypatch, message):
    assert start_with_errors(monkeypatch, []) == ["start"]
    assert start_with_errors(monkeypatch, [Exception(message)]) == ["start", "stop", "start"]
    with pytest.raises(Exception, match=message):
        start_with_errors(monkeypatch, [Exception(message)] * 2)


def test_other_errors_end_the_start(monkeypatch):
    with pytest.raises(ValueError, match="num_cpus"):
        start_with_errors(monkeypatch, [ValueError("num_cpus")])
