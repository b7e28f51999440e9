"""Whether a request comes from the page's own address."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from werkzeug.datastructures import Headers

from .errors import Foreign

#: names that the tab answers to beside its own, with commas between them; "*": any
HOSTS = "NEMO_FP8_DEBUG_HOSTS"


def own_names(bound: str | None) -> frozenset[str]:
    """Names that the tab answers to beside localhost and addresses in digits: the bound one, the machine's, and those in
    `HOSTS`, after an empty one that stands for that they were given."""
    given = {name.strip().lower() for name in os.environ.get(HOSTS, "").split(",")} - {""}
    own = {name.lower() for name in (bound, socket.gethostname()) if name}
    return frozenset(own | given | ({""} if given else set()))


def check_host(headers: Headers, names: Collection[str]) -> None:
    """Refuse a request for a name that is not the tab's: another site can have its own name resolve to this machine.

    Args:
        names: those of `own_names`.

    Raises:
        Foreign: it is another name.
    """
    host = headers.get("Host", "")
    if "*" not in names and not any(is_local(host, name) for name in {"localhost", *names} - {""}):
        raise Foreign(
            f"The tab does not answer to the name {host[:80]!r}. If it is this machine's, start TensorBoard with the "
            f"environment variable {HOSTS} set to it."
        )


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def check_origin(headers: Headers, names: Collection[str] = ()) -> None:
    """Refuse a request that another site's page makes.

    Behind a proxy the page's host is the one that the proxy was asked for, which it says in X-Forwarded-Host if not in Host.
    Anybody can write that header, so that it counts only if names were given in `HOSTS`, and holds one of them.

    Args:
        names: those of `own_names`.

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
    told = headers.get("X-Forwarded-Host", "").split(",") if "" in names else []
    forwarded = [host for host in told if "*" in names or _hostname(host.strip().lower()) in names]
    if _host(origin) not in {_plain(host) for host in (headers.get("Host", ""), *forwarded)} - {""}:
        raise Foreign("The request comes from a page of another origin; open the page's own address instead.")


def is_local(host: str, bound: str) -> bool:
    """Whether a Host header names this server: as localhost, by an address in numbers, or by the name it is bound to.

    A page of another site that has its own name resolve to this machine names that.

    Example:
        >>> is_local("127.0.0.1:6006", "localhost"), is_local("example.com:6006", "localhost")
        (True, False)
    """
    name = _hostname(host) or ""
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
