"""Layer names as text: what wrappers put into them, and patterns that choose them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence

from .errors import ConfigError

#: path components that wrappers put between a model and its layers
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


def without_wrappers(name: str) -> str:
    """A dotted name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def compile_patterns(patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """A test of layer names: whether any pattern matches.

    A glob matches a whole name, its end (`linear_fc2`), or a part of the tree (`decoder.layers.3`); `re:` starts a regular
    expression, searched for anywhere in the name.

    Raises:
        ConfigError: a regular expression does not compile.
    """
    if patterns is None:
        return lambda name: True
    expressions = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expressions.append(re.compile(pattern[3:]))
            except re.error as error:
                raise ConfigError(f"layer pattern {pattern!r} is not a regular expression: {error}") from None
        else:
            glob = fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
            expressions.append(re.compile(rf"(^|\.)(?:{glob})(\.|$)"))
    return lambda name: any(e.search(name) for e in expressions)
