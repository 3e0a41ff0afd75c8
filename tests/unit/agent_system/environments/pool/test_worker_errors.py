"""Test that errors reported by an environment worker hold no secrets of its settings."""

from agent_system.environments.pool import wire
from agent_system.environments.pool.worker import start_host
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
