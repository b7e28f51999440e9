"""The story as Markdown, to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...numerics.metric_names import LABELS
from ..diagnosis.narrator import show_value

#: rows of each table
_EVENTS, _TENSORS = 15, 8


def story_markdown(told: Mapping[str, Any]) -> str:
    """A story as Markdown that GitHub and GitLab show; its heading, which names the runs, is the caller's.

    Args:
        told: as of `story`.

    Example:
        >>> from nemo_fp8_debug.analysis.story.story import story
        >>> told = story_markdown(story(diagnose("runs/bad", "runs/baseline")))
        >>> print(told.splitlines()[0])
        - **Why (high confidence)**: The learning rate is wrong at step 60. It left the baseline's after step 59 ...
    """
    return "\n".join([*_facts(told["headline"]), *_events(told), *_tensors(told["tensors"])])


def _facts(headline: Mapping[str, Any]) -> Iterator[str]:
    first = headline["first"]
    kind = "First tensor, a consequence" if first and first["is_consequence"] else "First tensor"
    facts = {
        f"Why ({headline['confidence']} confidence)" if headline["confidence"] else "Why": _plain(headline["cause_told"]),
        "Gap": headline["gap_told"] and _plain(headline["gap_told"]),
        kind: first and _since(first, headline["unit"]),
        "Early warning": headline["warning"] and _plain(headline["warning"]),
        "What to do": headline["change"] and _plain(headline["change"]),
    }
    yield from (f"- **{name}**: {fact}" for name, fact in facts.items() if fact)


def _events(told: Mapping[str, Any]) -> Iterator[str]:
    events = told["events"]
    if events:
        unit = told["headline"]["unit"]
        yield from _table((unit, "what happened"), [(str(e["step"]), _plain(e["what"])) for e in events], _EVENTS)


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if tensors:
        rows = [(str(row["harm_rank"]), _named(row), _moved(row), _plain(row["why"])) for row in tensors]
        yield from _table(("rank by harm", "tensor", "baseline -> run", "why"), rows, _TENSORS)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    yield from (f"| {' | '.join(row)} |" for row in rows[:most])
    if len(rows) > most:
        yield f"\n{len(rows) - most} more are left out."


def _since(first: Mapping[str, Any], unit: str) -> str:
    others = f", with {first['with']} more" if first["with"] else ""
    return _named(first) + ("" if first["since"] is None else f" since {unit} {first['since']}{others}")


def _named(row: Mapping[str, Any]) -> str:
    """A tensor as code: its name has underscores, which Markdown would take for its own."""
    layer = " ".join(row["layer"].split()).replace("`", "").replace("|", "\\|")
    return f"{row['tensor']} of `{layer}`"


def _moved(row: Mapping[str, Any]) -> str:
    metric = row["metric"]
    if row["zero_since"] is not None:
        return f"all values zero since {row['zero_since']}"
    if metric is None or metric == "nonfinite":
        return "-"
    return f"{LABELS[metric][0]} " + " -> ".join(show_value(metric, row[which]) for which in ("expected", "found"))


def _plain(text: str) -> str:
    """On one line, and no markup of its own."""
    line = " ".join(text.split())
    for sign in "\\|*_[]#":
        line = line.replace(sign, f"\\{sign}")
    return line.replace("<", "&lt;")
