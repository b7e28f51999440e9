"""Comparisons as one page that needs nothing but a browser: no network, no other file. Internal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..comparison.comparison import Comparison
from ..comparison.summary import to_json
from ..formatting import number

#: tensors in the page's tables
_LISTED = 40


def check_page(path: str | os.PathLike[str]) -> None:
    """Whether a page can be written, before the work is done.

    Raises:
        ConfigError: the file exists, its folder does not, or a library is missing.
    """
    if Path(path).exists():
        raise ConfigError(f"{path} exists and is not overwritten; name another file")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{path} cannot be written: No such file or directory")
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a page needs {error.name}: pip install 'nemo-fp8-debug[html]'") from None


def write_page(path: str | os.PathLike[str], comparisons: Sequence[Comparison]) -> None:
    """Write the page.

    Raises:
        ConfigError: the file exists or cannot be written, or a library is missing.
    """
    check_page(path)
    content = page(comparisons)
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def page(comparisons: Sequence[Comparison]) -> str:
    """The page of one baseline and what was compared with it."""
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = _shown
    template = environment.from_string((Path(__file__).parent / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(plotly_js=get_plotlyjs(), sections=[_section(found) for found in comparisons])


def _shown(value: Any) -> Any:
    return number(value) if isinstance(value, float) else "-" if value is None else value


def _section(found: Comparison) -> dict[str, Any]:
    from . import plots

    plain = to_json(found)
    return {
        "verdict": plain["verdict"],
        "notes": plain["notes"],
        "unit": plain["unit"],
        "runs": plain["runs"],
        "tensors": plain["tensors"][:_LISTED],
        "n_tensors": len(plain["tensors"]),
        "out_of_band": plain["out_of_band"][:_LISTED],
        "n_out_of_band": len(plain["out_of_band"]),
        "groups": plain["groups"],
        "differences": plain["differences"],
        "plots": plots.of(found),
    }
