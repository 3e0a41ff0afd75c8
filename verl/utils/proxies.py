"""Services of this machine are asked directly; others through the proxy of the environment."""

import ipaddress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def is_loopback(host: str) -> bool:
    """Return whether ``host``, a name or an address, is this machine's own loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def trusts_proxies(url: str) -> bool:
    """Return whether a client of ``url`` may use the proxy of the environment: ``trust_env`` of
    httpx.
    """
    return not is_loopback(_host(url))


def describe_proxy(url: str) -> str:
    """Return words about the proxy between here and ``url``, for an error; empty without one.

    ``describe_proxy("http://search:80")`` is ``" through the proxy http://p:3128 (HTTP_PROXY,
    NO_PROXY)"`` where ``HTTP_PROXY=http://p:3128``.
    """
    host = _host(url)
    if is_loopback(host) or proxy_bypass(host):
        return ""
    proxies = getproxies()
    scheme = urlsplit(url).scheme
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy:
        return ""
    # Without the password that the address may hold.
    address = proxy.rpartition("@")[2]
    name = scheme if proxies.get(scheme) else "all"
    return f" through the proxy {address} ({name.upper()}_PROXY, NO_PROXY)"


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
