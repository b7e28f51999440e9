"""The tab's page served by itself, on the tab's own routes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from werkzeug import Request, Response
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from ...errors import ConfigError
from ..plugin import Bundle, FP8Plugin, wsgi_of
from ..records.logdir import Root
from ..web.errors import Foreign, NotThere
from ..web.same_origin import is_local
from .html import page

#: where routes lie, as below TensorBoard
_ROUTES = "/data/plugin/fp8"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)


class _Quiet(WSGIRequestHandler):
    """Requests are not worth a line each."""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Nothing."""


def server(roots: Sequence[Root], host: str, port: int) -> BaseWSGIServer:
    """A server that is bound and not started.

    Args:
        host: a name or address of this machine; requests have to name it, localhost, or an address in numbers.
        port: 0 for any that is free.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as bound:
            return make_server(
                host, port, application(roots, host), threaded=True, request_handler=_Quiet, fd=bound.fileno()
            )
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror}; choose another --port, 0 for any"
        ) from None


def application(roots: Sequence[Root], host: str) -> Callable[..., Iterable[bytes]]:
    """WSGI: the page at /, its script and the tab's routes below `/data/plugin/fp8`."""
    places = {f"{_ROUTES}{name}": route for name, route in FP8Plugin.over(roots).get_plugin_apps().items()}
    places |= {f"{_ROUTES}/page.js": wsgi_of(Bundle()), "/": wsgi_of(_index)}
    missing, foreign = wsgi_of(_missing), wsgi_of(_foreign)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        ours = is_local(environ.get("HTTP_HOST", ""), host)
        chosen = places.get(environ.get("PATH_INFO", ""), missing) if ours else foreign
        found: Iterable[bytes] = chosen(environ, start_response)
        return found

    return answer


def _index(request: Request) -> Response:
    response = Response(page("FP8", f'<script src="{_ROUTES[1:]}/page.js"></script>'), mimetype="text/html")
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["Cache-Control"] = "no-store"
    return response


def _missing(request: Request) -> Response:
    raise NotThere("There is nothing at this address; the page is at /.")


def _foreign(request: Request) -> Response:
    raise Foreign("This name is not the server's; open the address that it printed, or name the server with --host.")
