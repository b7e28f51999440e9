"""Whether a request comes from the page's own address."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from werkzeug.datastructures import Headers

from .errors import Foreign


def check_origin(headers: Headers) -> None:
    """Refuse a request that another site's page makes.

    Behind a proxy the page's host is the one that the proxy was asked for, which it says in X-Forwarded-Host if not in Host.

    Raises:
        Foreign: another site made it.
    """
    site = headers.get("Sec-Fetch-Site", "").strip().lower()
    origin = headers.get("Origin")
    # A script or image of a page on another port comes without an Origin.
    if site == "cross-site" or (site == "same-site" and origin is None):
        raise Foreign("The request comes from a page of another site; open the page's own address instead.")
    # What a browser itself says is of the same origin is, whatever proxies made of the host on the way.
    if origin is None or site in ("same-origin", "none"):
        return
    forwarded = headers.get("X-Forwarded-Host", "").split(",")
    if _host(origin) not in {_plain(host) for host in (headers.get("Host", ""), *forwarded)} - {""}:
        raise Foreign("The request comes from a page of another origin; open the page's own address instead.")


def is_local(host: str, bound: str) -> bool:
    """Whether a Host header names this server: as localhost, by an address in numbers, or by the name it is bound to.

    A page of another site that has its own name resolve to this machine names that.

    Example:
        >>> is_local("127.0.0.1:6006", "localhost"), is_local("example.com:6006", "localhost")
        (True, False)
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in ("localhost", bound.lower()) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host(origin: str) -> str | None:
    try:
        return _plain(urlsplit(origin).netloc)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """Without the ports that are understood."""
    host = host.strip().lower()
    return host.removesuffix(":80").removesuffix(":443")
