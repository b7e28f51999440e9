"""Answers that stand in a page, under the names that the page knows them by."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import quote

from ..web.json_values import encoded

#: what JavaScript's encodeURIComponent leaves as it is
_PLAIN = "!'()*~-_."


def name_of(route: str, **parameters: object) -> str:
    """The name of an answer, as `nameOf` of the page's `sources/standing.js` makes it.

    Example:
        >>> name_of("frames", run="a b", metric="mse", table=None)
        'frames?metric=mse&run=a%20b'
    """
    given = sorted((name, value) for name, value in parameters.items() if value is not None)
    return f"{route}?{'&'.join(f'{name}={quote(str(value), safe=_PLAIN)}' for name, value in given)}"


class Held:
    """Answers by name, each gzip in base64."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        #: characters of all
        self.size = 0

    def put(self, name: str, answer: Any) -> int:
        """Hold an answer, bytes or what JSON can say; how many characters it takes."""
        content = answer if isinstance(answer, bytes) else encoded(answer).encode()
        text = base64.b64encode(gzip.compress(content, mtime=0)).decode()
        self.size += len(text) - len(self._texts.get(name, ""))
        self._texts[name] = text
        return len(text)

    def names(self) -> list[str]:
        """Of all that is held."""
        return list(self._texts)

    def keep(self, names: Collection[str]) -> None:
        """Let go of everything else."""
        self._texts = {name: text for name, text in self._texts.items() if name in names}
        self.size = sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._texts.items())


def as_script(value: Any) -> str:
    """JSON that can stand in a script of a page, whatever text is in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
