"""Tests that loopback addresses bypass a proxy, and that a proxy is named without its password."""

import pytest

from verl.utils.proxies import describe_proxy, is_loopback, uses_proxy_variables

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_loopback_is_recognised(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_proxy_is_named_without_its_password(monkeypatch, variable):
    monkeypatch.setenv(variable, "http://me:secret@proxy.example:3128")
    description = describe_proxy("http://search.example:8000/retrieve")
    assert (
        "proxy.example:3128" in description
        and variable.upper() in description
        and "secret" not in description
    )
    assert uses_proxy_variables("http://search.example:8000/retrieve")
    for url in ("http://127.0.0.1:8000/x", "http://[::1]:8000/x", "http://localhost/x"):
        assert describe_proxy(url) == "" and not uses_proxy_variables(url)
    monkeypatch.setenv("NO_PROXY", "search.example")
    assert describe_proxy("http://search.example:8000/retrieve") == ""
