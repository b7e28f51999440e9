"""Whether a request comes from TensorBoard's own page."""

from __future__ import annotations

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
        raise Foreign("The request comes from a page of another site; open TensorBoard's own address instead.")
    # What a browser itself says is of the same origin is, whatever proxies made of the host on the way.
    if origin is None or site in ("same-origin", "none"):
        return
    forwarded = headers.get("X-Forwarded-Host", "").split(",")
    if _host(origin) not in {_plain(host) for host in (headers.get("Host", ""), *forwarded)} - {""}:
        raise Foreign("The request comes from a page of another origin; open TensorBoard's own address instead.")


def _host(origin: str) -> str | None:
    try:
        return _plain(urlsplit(origin).netloc)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """Without the ports that are understood."""
    host = host.strip().lower()
    return host.removesuffix(":80").removesuffix(":443")
