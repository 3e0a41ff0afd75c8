"""Choice of HTTP proxies. Requests to this machine use none, others the environment's proxy."""

import ipaddress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is "localhost" or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def uses_proxy_variables(url: str) -> bool:
    """Return True if requests to ``url`` may use the environment's proxy (httpx ``trust_env``)."""
    return not is_loopback(_get_host(url))


def describe_proxy(url: str) -> str:
    """Return a phrase for error messages that names the proxy for ``url``; "" without a proxy.

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
    # Remove user name and password, which stand before "@" in the address.
    address = proxy.rpartition("@")[2]
    name = scheme if proxies.get(scheme) else "all"
    return f" through the proxy {address} ({name.upper()}_PROXY, NO_PROXY)"


def _get_host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
