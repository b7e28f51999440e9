"""A recommendation as files that hosts read; says what a host cannot express, and what it has instead. Internal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ....errors import ConfigError
from ..recommend import Recommendation
from . import megatron, options, te_debug
from .snippet import Snippet

PLAN = "plan.json"


def snippets_of(found: Recommendation) -> list[Snippet]:
    """The files of every host that has something to change."""
    made: list[Snippet | None] = []
    if _may_have(found, "Megatron"):
        made += [megatron.per_module(found), *options.run_wide(found)]
    if _may_have(found, "Transformer Engine"):
        made.append(te_debug.features(found))
    return [snippet for snippet in made if snippet]


def _may_have(found: Recommendation, framework: str) -> bool:
    """Whether files for a framework can be of use: a run that is not quantized has to have it, as far as is known."""
    fingerprint = found.run.fingerprint
    sampled = fingerprint.get("sampled")
    if found.in_use or not isinstance(sampled, Mapping) or "backends" not in sampled:
        return True
    megatron_config = framework == "Megatron" and bool(fingerprint.get("backend_options"))
    return megatron_config or any(str(name).startswith(framework) for name in sampled["backends"])


def write(found: Recommendation, folder: str | os.PathLike[str]) -> list[Snippet]:
    """Write the plan and the files of every host into a folder, which is made.

    Raises:
        ConfigError: it holds one of them already, or cannot be written.
    """
    snippets, place = snippets_of(found), Path(folder)
    if there := next((name for name in (PLAN, *(s.name for s in snippets)) if (place / name).exists()), None):
        raise ConfigError(f"{place / there} exists and is not overwritten; name another folder")
    try:
        place.mkdir(parents=True, exist_ok=True)
        found.plan.save(place / PLAN)
        for snippet in snippets:
            with (place / snippet.name).open("x") as file:
                file.write(snippet.text)
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {error.strerror}") from None
    return snippets
