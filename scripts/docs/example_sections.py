"""An extension of griffe for mkdocs.yml: `Example:` in docstrings is a section of examples, as `Examples:` is to griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Without it a `>>>` line is Markdown, and `[...][...]` in it a cross-reference that leads nowhere."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object whose source was read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
