"""A recommendation as files that hosts read; says what a host cannot express, and what it has instead. Internal."""

from __future__ import annotations

import os
from pathlib import Path

from ....errors import ConfigError
from ..recommend import MEGATRON, TORCHAO, TRANSFORMER_ENGINE, Recommendation, engines_of
from . import megatron, te_quantizers, torchao
from .snippet import Snippet

PLAN = "plan.json"


def make_snippets(found: Recommendation) -> list[Snippet]:
    """The files of the engine that quantizes the run, if there is something to change."""
    return _made(found)[0]


def list_unwritten(found: Recommendation) -> list[str]:
    """Files that the engine could have had, and why it gets none, a sentence each."""
    return _made(found)[1]


def _made(found: Recommendation) -> tuple[list[Snippet], list[str]]:
    engines = engines_of(found.run)
    made: list[Snippet | None] = []
    reasons: list[str] = []
    if MEGATRON in engines:
        made += [megatron.make_per_module(found), megatron.make_run_wide(found)]
    if TRANSFORMER_ENGINE in engines:
        files, reasons = te_quantizers.make_quantizers(found, MEGATRON in engines)
        made += files
    if TORCHAO in engines:
        files, more = torchao.make_configuration(found)
        made, reasons = [*made, *files], [*reasons, *more]
    return [snippet for snippet in made if snippet], reasons


def write_snippets(found: Recommendation, folder: str | os.PathLike[str]) -> list[Snippet]:
    """Write the plan and the files of every host into a folder, which is made.

    Raises:
        ConfigError: it holds one of them already, or cannot be written.
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
