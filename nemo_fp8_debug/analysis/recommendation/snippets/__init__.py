"""Write a recommendation as files of frameworks, with notes on changes that they cannot express. Internal."""

from __future__ import annotations

import os
from pathlib import Path

from ....errors import ConfigError
from ..recommend import MEGATRON, TORCHAO, TRANSFORMER_ENGINE, Recommendation, find_cast_engines
from . import megatron, te_quantizers, torchao
from .snippet import Snippet

PLAN = "plan.json"


def make_snippets(found: Recommendation) -> list[Snippet]:
    """Return the files for the engine that quantizes the run, if there are changes."""
    return _made(found)[0]


def explain_missing_snippets(found: Recommendation) -> list[str]:
    """Return sentences that name files for the engine that are not written, with the reasons."""
    return _made(found)[1]


def _made(found: Recommendation) -> tuple[list[Snippet], list[str]]:
    engines = find_cast_engines(found.run)
    made: list[Snippet | None] = []
    reasons: list[str] = []
    if MEGATRON in engines:
        made += [megatron.make_module_recipes_snippet(found), megatron.make_global_options_snippet(found)]
    if TRANSFORMER_ENGINE in engines:
        files, reasons = te_quantizers.make_quantizer_snippets(found, MEGATRON in engines)
        made += files
    if TORCHAO in engines:
        files, more = torchao.make_torchao_snippet(found)
        made, reasons = [*made, *files], [*reasons, *more]
    return [snippet for snippet in made if snippet], reasons


def write_snippets(found: Recommendation, folder: str | os.PathLike[str]) -> list[Snippet]:
    """Write the plan and the files of all frameworks into a folder. Create the folder if needed.

    Raises:
        ConfigError: the folder already holds one of the files, or is not writable.
    """
    snippets, place = make_snippets(found), Path(folder)
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
