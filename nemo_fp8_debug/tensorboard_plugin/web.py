"""HTTP requests and answers: parameters, errors, JSON, the page's script, and addresses."""

from __future__ import annotations

import gzip
import hashlib
import ipaddress
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from tensorboard.backend import http_util
from werkzeug import Request, Response
from werkzeug.datastructures import Headers

from ..errors import RecordError
from .cache import LRUCache


class RequestError(Exception):
    """The error for a refused request. The message names the problem, the parameter, and what to do."""

    status = 400


class BadParameterError(RequestError):
    """The error for a missing, unknown, repeated or invalid parameter."""


class ForeignSiteError(RequestError):
    """The error for a request from another site."""

    status = 403


class NotFoundError(RequestError):
    """The error for a run, tensor or step that does not exist."""

    status = 404


class UnreadableRecordError(RequestError):
    """The error for a record that exists but is unreadable."""

    status = 409


def replace_nonfinite_by_null(values: Any) -> list[float | None]:
    """Return float64 [N] as a list, with null for values that are not finite."""
    values = np.asarray(values, np.float64)
    listed = values.tolist()
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        listed[i] = None
    return listed  # type: ignore[no-any-return]


def encode_json(answer: Any) -> str:
    """Encode an answer that `make_jsonable` or `replace_nonfinite_by_null` prepared."""
    return json.dumps(answer, allow_nan=False, separators=(",", ":"))


#: largest number of characters in a name, and largest number of a name's characters in an error
_LONGEST, _SHOWN = 2000, 80
_WHOLE = re.compile(r"[0-9]{1,18}")
#: largest number of metrics in one request
_MOST_METRICS = 16
#: largest number of columns of a picture
_MOST_COLUMNS = 2000


@dataclass(frozen=True)
class RouteParameter:
    """A parameter: the function that reads its text, and its default."""

    read: Callable[[str, str], Any]
    #: default of the parameter; without a default, the parameter is required
    default: Any = ...


def parse_parameters(given: Iterable[tuple[str, str]], expected: Mapping[str, RouteParameter]) -> dict[str, Any]:
    """Return the values of all expected parameters by name, or their defaults.

    Raises:
        BadParameterError: a parameter is missing, unknown, repeated or invalid.
    """
    texts: dict[str, str] = {}
    for name, text in given:
        if name not in expected:
            takes = ", ".join(expected) or "none"
            raise BadParameterError(f"Unknown parameter {quote_text(name)}; this address takes: {takes}.")
        if name in texts:
            raise BadParameterError(f"Parameter {name} is given more than once; give it once.")
        texts[name] = text
    missing = [name for name, parameter in expected.items() if parameter.default is ... and name not in texts]
    if missing:
        raise BadParameterError(f"Parameter {missing[0]} is missing; add it to the address.")
    return {name: p.read(name, texts[name]) if name in texts else p.default for name, p in expected.items()}


def quote_text(text: str) -> str:
    """Quote a text for an error, cut to one line and with unprintable characters escaped."""
    cut = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return repr(cut)


def parse_text_parameter(name: str, value: str) -> str:
    """Read the name of a run, a layer or a recipe."""
    if not 0 < len(value) <= _LONGEST:
        raise BadParameterError(f"Parameter {name} has {len(value)} characters; give 1 to {_LONGEST}.")
    return value


def parse_step_parameter(name: str, value: str) -> int:
    """Read a training step."""
    if not _WHOLE.fullmatch(value):
        raise BadParameterError(
            f"Parameter {name} is {quote_text(value)}; give a step, a whole number of at most 18 digits."
        )
    return int(value)


def parse_count_parameter(name: str, value: str) -> int:
    """Parse a parameter that is a number of columns, from 1 to 2000."""
    if not _WHOLE.fullmatch(value) or not 0 < int(value) <= _MOST_COLUMNS:
        raise BadParameterError(f"Parameter {name} is {quote_text(value)}; give a whole number from 1 to {_MOST_COLUMNS}.")
    return int(value)


def make_choice_parser(choices: Iterable[str]) -> Callable[[str, str], str]:
    """Return a function that reads one of a few words."""
    known = tuple(choices)

    def read(name: str, value: str) -> str:
        if value not in known:
            raise BadParameterError(f"Parameter {name} is {quote_text(value)}; choose from {', '.join(known)}.")
        return value

    return read


def make_choices_parser(choices: Iterable[str]) -> Callable[[str, str], list[str]]:
    """Return a function that reads several words, separated by commas."""
    one = make_choice_parser(choices)

    def read(name: str, value: str) -> list[str]:
        words = value.split(",", _MOST_METRICS)
        if len(words) > _MOST_METRICS or len(set(words)) < len(words):
            raise BadParameterError(
                f"Parameter {name} lists more than {_MOST_METRICS} names or a name twice; leave some out."
            )
        return [one(name, word) for word in words]

    return read


@dataclass(frozen=True)
class Route:
    """The parameters of an address, and the function that answers."""

    answer: Callable[..., Any]
    parameters: Mapping[str, RouteParameter]

    def answer_query(self, given: Iterable[tuple[str, str]]) -> Any:
        """Return the answer to a request with these parameters: bytes, or values for JSON.

        Raises:
            RequestError: a parameter is wrong, or there is no such run, tensor or step.
        """
        return self.answer(**parse_parameters(given, self.parameters))


def link(address: str = "http://localhost:6006", **state: object) -> str:
    """Return the address that shows a state of the tab.

    Args:
        address: address of TensorBoard.
        state: `view` (verdict, course, map, timeline, distribution, what_if, runs, fingerprints), `run`, `baseline` and
            `reference` (names of runs in the tab), `metric`, `step`, `layer`, `role`. None leaves an entry out.
    """
    kept = [f"p.fp8.{key}={quote(str(value), safe='')}" for key, value in state.items() if value is not None]
    return "&".join([f"{address.rstrip('/')}/#fp8", *kept])


#: environment variable with further host names that the tab accepts, separated by commas; "*" accepts any name
HOSTS = "NEMO_FP8_DEBUG_HOSTS"


def list_accepted_host_names(bound: str | None) -> frozenset[str]:
    """Return the host names that the tab accepts in requests, in addition to localhost and numeric addresses.

    These are the name that the server is bound to, the machine's name, and the names in `HOSTS`. An empty name in the result
    means that `HOSTS` is set.
    """
    given = {name.strip().lower() for name in os.environ.get(HOSTS, "").split(",")} - {""}
    own = {name.lower() for name in (bound, socket.gethostname()) if name}
    return frozenset(own | given | ({""} if given else set()))


def check_host(headers: Headers, names: Collection[str]) -> None:
    """Refuse a request for a foreign host name, because another site can let its own name resolve to this machine.

    Args:
        names: the result of `list_accepted_host_names`.

    Raises:
        ForeignSiteError: the tab does not accept the name.
    """
    host = headers.get("Host", "")
    if "*" not in names and not any(names_this_server(host, name) for name in {"localhost", *names} - {""}):
        raise ForeignSiteError(
            f"The tab does not answer to the name {host[:80]!r}. If this name is the machine's, start TensorBoard with the "
            f"environment variable {HOSTS} set to this name."
        )


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def check_origin(headers: Headers, names: Collection[str] = ()) -> None:
    """Refuse a request from another site's page.

    A proxy passes the page's host in X-Forwarded-Host, if not in Host. Any client can set that header, so we use the header
    only if `HOSTS` is set and the header contains one of `names`.

    Args:
        names: the result of `list_accepted_host_names`.

    Raises:
        ForeignSiteError: the request comes from another site.
    """
    site = headers.get("Sec-Fetch-Site", "").strip().lower()
    origin = headers.get("Origin")
    # A request for a script or image from a page on another port has no Origin header.
    if site == "cross-site" or (site == "same-site" and origin is None):
        raise ForeignSiteError("The request comes from a page of another site; open the page's own address instead.")
    # If the browser reports the same origin, accept the request, even if proxies have changed the host.
    if origin is None or site in ("same-origin", "none"):
        return
    told = headers.get("X-Forwarded-Host", "").split(",") if "" in names else []
    forwarded = [host for host in told if "*" in names or _hostname(host.strip().lower()) in names]
    if _host(origin) not in {_plain(host) for host in (headers.get("Host", ""), *forwarded)} - {""}:
        raise ForeignSiteError("The request comes from a page of another origin; open the page's own address instead.")


def names_this_server(host: str, bound: str) -> bool:
    """Return True if a Host header names this server by localhost, a numeric address, or the name that it is bound to.

    If another site's name resolves to this machine, requests of its pages contain the other site's name in the header.

    Example:
        >>> [names_this_server(host, "localhost") for host in ("127.0.0.1:6006", "example.com:6006")]
        [True, False]
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
    """Return the host without a default port."""
    host = host.strip().lower()
    return host.removesuffix(":80").removesuffix(":443")


SCRIPT = Path(__file__).with_name("static") / "page.js"
#: code that turns the script into a module that TensorBoard imports and calls
_AS_MODULE = b"export const render = () => fp8Debug(null, import.meta.url);\n"


class CachedPageScript:
    """The page's script. Browsers cache the script until it changes."""

    def __init__(self, is_module: bool = False) -> None:
        """
        Args:
            is_module: True for a module, which TensorBoard imports, False for a classic script.
        """
        self._more = _AS_MODULE if is_module else b""
        self._packed: LRUCache[tuple[bytes, str]] = LRUCache(1)

    def __call__(self, request: Request) -> Response:
        """Return the script, or status 304 if it has not changed."""
        packed, digest = self._packed.get_or_make(SCRIPT.stat().st_mtime_ns, self._pack)
        response = http_util.Respond(request, packed, "text/javascript", content_encoding="gzip")
        response.set_etag(digest)
        response.headers["Cache-Control"] = "no-cache"
        del response.headers["Expires"]
        return response.make_conditional(request)  # type: ignore[no-any-return]

    def _pack(self) -> tuple[bytes, str]:
        content = SCRIPT.read_bytes() + self._more
        return gzip.compress(content, mtime=0), hashlib.sha256(content).hexdigest()[:32]


def make_wsgi_application(answer: Callable[[Request], Response], names: Collection[str] | None = None) -> Callable[..., Any]:
    """Return a WSGI application around a function that answers requests. The answer to a refused request is a sentence.

    Args:
        names: the result of `list_accepted_host_names`; None: the server checks the host name itself.
    """

    def application(environ: Any, start_response: Any) -> Any:
        request = Request(environ)
        try:
            if request.method not in ("GET", "HEAD"):
                response = _error(request, 405, "This address answers only GET requests.")
            else:
                if names is not None:
                    check_host(request.headers, names)
                check_origin(request.headers, names or ())
                response = answer(request)
        except RequestError as error:
            response = _error(request, error.status, str(error))
        except (RecordError, OSError, RecursionError) as error:
            response = _error(request, 409, f"The record cannot be read: {error}")
        except Exception as error:
            logging.getLogger("nemo_fp8_debug").exception("the FP8 tab could not answer %s", request.path)
            response = _error(
                request, 500, f"Internal error of the FP8 tab ({type(error).__name__}); see TensorBoard's log."
            )
        return response(environ, start_response)

    return application


def make_route_handler(route: Route) -> Callable[[Request], Response]:
    """Return a function that answers requests to a route."""

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
