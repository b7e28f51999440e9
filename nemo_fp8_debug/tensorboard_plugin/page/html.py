"""Pages of their own: what a browser opens."""

from __future__ import annotations

from html import escape
from typing import Any

from ..plugin import SCRIPT
from .held import as_script

#: of a page in one file: nothing is loaded from anywhere
_ALONE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_WITHOUT = "This page is drawn by its script: switch JavaScript on to see it."


def page(title: str, scripts: str, policy: str = "") -> str:
    """The frame around scripts."""
    allowed = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n' if policy else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{allowed}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n</head>\n'
        f"<body>\n<noscript>{_WITHOUT}</noscript>\n{scripts}\n</body>\n</html>\n"
    )


def alone(title: str, data: dict[str, Any]) -> str:
    """A page in one file."""
    # Within strings and comments of a script these mean the same, and nothing to what reads HTML.
    code = SCRIPT.read_text(encoding="utf-8").replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return page(title, f"<script>{data_script(data)}</script>\n<script>{code}</script>", _ALONE)


def data_script(data: dict[str, Any]) -> str:
    """What gives a page its data."""
    return f"globalThis.fp8DebugPage = {as_script(data)};"
