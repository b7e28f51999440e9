"""Import logs of other tools as a run record. Internal."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import RecordError
from ..writer import RunRecordWriter
from . import msprobe, nvdlfw
from .importer import ImportedLog

_FORMATS = (nvdlfw, msprobe)
_EXPECTED = "; ".join(f"{tool.TOOL}: {tool.EXPECTED}" for tool in _FORMATS)


def import_logs(source: str | os.PathLike[str], output: str | os.PathLike[str]) -> ImportedLog:
    """Convert another tool's logs to a record, and return what was imported. Each import into the same `output` adds an
    attempt.

    Args:
        source: a log, or a folder with the logs of one run. The files show which tool wrote them.
        output: folder of the record, or any fsspec address.

    Raises:
        RecordError: no log can be read, or two tools wrote logs there.
        ConfigError: the record cannot be written.
    """
    root = Path(source)
    if not root.exists():
        raise RecordError(f"{root} does not exist; name a log or a folder of logs ({_EXPECTED})")
    try:
        imported = _read(root)
    except OSError as error:
        raise RecordError(f"{error.filename or root} cannot be read: {error.strerror or error}") from None
    _write(imported, source, output)
    return imported


def _read(root: Path) -> ImportedLog:
    files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    claimed = {tool: mine for tool in _FORMATS if (mine := [p for p in files if tool.recognizes_file(p)])}
    if not claimed:
        raise RecordError(f"{root} is not a log that can be imported, and contains no such log ({_EXPECTED})")
    if len(claimed) > 1:
        found = ", ".join(f"{tool.TOOL} ({mine[0]})" for tool, mine in claimed.items())
        raise RecordError(f"{root} contains logs of {len(claimed)} tools: {found}; name a folder with logs of one")
    ((tool, mine),) = claimed.items()
    imported: ImportedLog = tool.read_logs(mine)
    if not imported.rows:
        reasons = "".join(f"; {what} ({n})" for what, n in imported.left_out.items())
        raise RecordError(f"{root} has no metric that can be imported ({tool.TOOL}: {tool.EXPECTED}){reasons}")
    return imported


def _write(imported: ImportedLog, source: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    record = RunRecordWriter(output)
    record.open(
        {
            "imported": {
                "tool": imported.tool,
                "from": os.path.abspath(source),
                "files": [str(path) for path in imported.files],
                "left_out": imported.left_out,
                "notes": imported.notes,
            }
        }
    )
    for sample in imported.samples():
        record.record(sample)
    record.record_steps(imported.steps)
    record.close()
