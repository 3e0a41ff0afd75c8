"""Use of proxies: requests to this machine are direct, others use the environment's proxy."""

import ipaddress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def is_loopback(host: str) -> bool:
    """Return true if ``host``, a name or an address, is the loopback of this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def trusts_proxies(url: str) -> bool:
    """Return true if a client of ``url`` may use the environment's proxy (httpx ``trust_env``)."""
    return not is_loopback(_get_host(url))


def describe_proxy(url: str) -> str:
    """Return a phrase about the proxy for ``url``, for an error message; empty without a proxy.

    Example: ``" through the proxy http://p:3128 (HTTP_PROXY, NO_PROXY)"``.
    """
    host = _get_host(url)
    if is_loopback(host) or proxy_bypass(host):
        return ""
    proxies = getproxies()
    scheme = urlsplit(url).scheme
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy:
        return ""
    # Remove a user name and password from the address.
    address = proxy.rpartition("@")[2]
    name = scheme if proxies.get(scheme) else "all"
    return f" through the proxy {address} ({name.upper()}_PROXY, NO_PROXY)"


def _get_host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
