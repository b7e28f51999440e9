"""Serve the tab's page by itself, on the tab's own routes; the HTML around its script."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from werkzeug import Request, Response
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from ...errors import ConfigError
from ..plugin import FP8Plugin
from ..records.logdir import Root
from ..web import SCRIPT, Foreign, NotThere, PageScript, build_wsgi, is_local
from .contents import encode_script

#: of a page in one file: nothing is loaded from anywhere
_ALONE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_WITHOUT = "This page is drawn by its script: switch JavaScript on to see it."


def render_page(title: str, scripts: str, policy: str = "") -> str:
    """Return the HTML around scripts."""
    allowed = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n' if policy else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{allowed}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n</head>\n'
        f"<body>\n<noscript>{_WITHOUT}</noscript>\n{scripts}\n</body>\n</html>\n"
    )


def render_alone(title: str, data: dict[str, Any]) -> str:
    """Return a page in one file."""
    # Within strings and comments of a script these mean the same, and nothing to what reads HTML.
    code = SCRIPT.read_text(encoding="utf-8").replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return render_page(title, f"<script>{render_data(data)}</script>\n<script>{code}</script>", _ALONE)


def render_data(data: dict[str, Any]) -> str:
    """Return the script that gives a page its data."""
    return f"globalThis.fp8DebugPage = {encode_script(data)};"


#: where routes lie, as below TensorBoard
_ROUTES = "/data/plugin/fp8"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)


class _Quiet(WSGIRequestHandler):
    """Requests are not worth a line each."""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Write nothing."""


def bind_server(roots: Sequence[Root], host: str, port: int) -> BaseWSGIServer:
    """Return a server that is bound and not started.

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
                host, port, _build_application(roots, host), threaded=True, request_handler=_Quiet, fd=bound.fileno()
            )
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror}; choose another --port, 0 for any"
        ) from None


def _build_application(roots: Sequence[Root], host: str) -> Callable[..., Iterable[bytes]]:
    """WSGI: the page at /, its script and the tab's routes below `/data/plugin/fp8`."""
    places = {f"{_ROUTES}{name}": route for name, route in FP8Plugin.open_folders(roots).get_plugin_apps().items()}
    places |= {f"{_ROUTES}/page.js": build_wsgi(PageScript()), "/": build_wsgi(_index)}
    missing, foreign = build_wsgi(_missing), build_wsgi(_foreign)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        ours = is_local(environ.get("HTTP_HOST", ""), host)
        chosen = places.get(environ.get("PATH_INFO", ""), missing) if ours else foreign
        found: Iterable[bytes] = chosen(environ, start_response)
        return found

    return answer


def _index(request: Request) -> Response:
    response = Response(render_page("FP8", f'<script src="{_ROUTES[1:]}/page.js"></script>'), mimetype="text/html")
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["Cache-Control"] = "no-store"
    return response


def _missing(request: Request) -> Response:
    raise NotThere("There is nothing at this address; the page is at /.")


def _foreign(request: Request) -> Response:
    raise Foreign("This name is not the server's; open the address that it printed, or name the server with --host.")
