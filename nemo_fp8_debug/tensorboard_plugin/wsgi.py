"""Answer requests over HTTP: whose are refused, errors in words, and the script of the page."""

from __future__ import annotations

import gzip
import hashlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tensorboard.backend import http_util
from werkzeug import Request, Response
from werkzeug.datastructures import Headers

from ..errors import RecordError
from .cache import Cache
from .web import Foreign, Refused, Route, encode_json

#: names that the tab answers to beside its own, with commas between them; "*": any
HOSTS = "NEMO_FP8_DEBUG_HOSTS"


def list_own_names(bound: str | None) -> frozenset[str]:
    """Return the names that the tab answers to, next to localhost and addresses in digits.

    These are the bound one, the machine's, and those in `HOSTS`. If there are such, an empty one says so.
    """
    given = {name.strip().lower() for name in os.environ.get(HOSTS, "").split(",")} - {""}
    own = {name.lower() for name in (bound, socket.gethostname()) if name}
    return frozenset(own | given | ({""} if given else set()))


def check_host(headers: Headers, names: Collection[str]) -> None:
    """Refuse a request for a name that is not the tab's: another site can have its own name resolve to this machine.

    Args:
        names: those of `list_own_names`.

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
        names: those of `list_own_names`.

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
    """Return True if a Host header names this server: as localhost, by an address in numbers, or as it is bound.

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


SCRIPT = Path(__file__).with_name("static") / "page.js"
#: what makes a module of the script that TensorBoard imports and calls
_AS_MODULE = b"export const render = () => fp8Debug(null, import.meta.url);\n"


class PageScript:
    """The page's script, kept by browsers as long as it stays the same."""

    def __init__(self, is_module: bool = False) -> None:
        """
        Args:
            is_module: whether it is a module, as TensorBoard imports it, and not a classic script.
        """
        self._more = _AS_MODULE if is_module else b""
        self._packed: Cache[tuple[bytes, str]] = Cache(1, lambda _: 1)

    def __call__(self, request: Request) -> Response:
        """Return the script, or that it has not changed."""
        packed, digest = self._packed.get(SCRIPT.stat().st_mtime_ns, self._pack)
        response = http_util.Respond(request, packed, "text/javascript", content_encoding="gzip")
        response.set_etag(digest)
        response.headers["Cache-Control"] = "no-cache"
        del response.headers["Expires"]
        return response.make_conditional(request)  # type: ignore[no-any-return]

    def _pack(self) -> tuple[bytes, str]:
        content = SCRIPT.read_bytes() + self._more
        return gzip.compress(content, mtime=0), hashlib.sha256(content).hexdigest()[:32]


def build_wsgi(answer: Callable[[Request], Response], names: Collection[str] | None = None) -> Callable[..., Any]:
    """Return WSGI around an answer to a request; a request that is refused gets a sentence.

    Args:
        names: that it answers to, of `list_own_names`; None: the server checks the name itself.
    """

    def application(environ: Any, start_response: Any) -> Any:
        request = Request(environ)
        try:
            if request.method not in ("GET", "HEAD"):
                response = _error(request, 405, "Only GET is answered here.")
            else:
                if names is not None:
                    check_host(request.headers, names)
                check_origin(request.headers, names or ())
                response = answer(request)
        except Refused as error:
            response = _error(request, error.status, str(error))
        except (RecordError, OSError, RecursionError) as error:
            response = _error(request, 409, f"The record cannot be read: {error}")
        except Exception as error:
            logging.getLogger("nemo_fp8_debug").exception("the FP8 tab could not answer %s", request.path)
            response = _error(
                request, 500, f"Internal error of the FP8 tab ({type(error).__name__}); TensorBoard's log tells more."
            )
        return response(environ, start_response)

    return application


def answer_route(route: Route) -> Callable[[Request], Response]:
    """Return what answers requests to a route."""

    def answer(request: Request) -> Response:
        found = route.answer_query(request.args.items(multi=True))
        kind = "application/octet-stream" if isinstance(found, bytes) else "application/json"
        return _response(request, found if isinstance(found, bytes) else encode_json(found), kind, 200)

    return answer


def _error(request: Request, status: int, sentence: str) -> Response:
    return _response(request, encode_json({"error": sentence}), "application/json", status)


def _response(request: Request, content: str | bytes, kind: str, status: int) -> Response:
    response = http_util.Respond(request, content, kind, code=status)
    response.headers["Cache-Control"] = "no-store"
    return response  # type: ignore[no-any-return]
