"""Records: files with other bytes, values that no run writes, fingerprints of any form; read, judged, and shown."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from nemo_fp8_debug import ConfigError, RecordError, read_record
from nemo_fp8_debug.errors import capture_warnings
from nemo_fp8_debug.record.schema import SCHEMAS
from nemo_fp8_debug.tensorboard_plugin.jobs.analyses import compare_and_diagnose_run, compute_metrics_under_recipe

from .limits import Finding, expect
from .mutations import json_values, mutated
from .records import changes, copied, rewritten, train

Changes = Sequence[Callable[[pa.Table], pa.Table]]
#: tables whose values are changed, as a rule those that all commands read
_TABLES = ("metrics", "metrics", "steps", "steps", "histograms", "what_if", "outputs", "states", "activations", "validation")


@functools.cache
def record() -> Path:
    """The real record that all examples begin with."""
    folder = Path(tempfile.mkdtemp(prefix="fuzzed-record-"))
    return train(folder / "run")


def fingerprint() -> dict[str, Any]:
    """Of that record."""
    found: dict[str, Any] = json.loads((record() / "attempt-0.json").read_text())
    return found


def _read_all(run: Path) -> None:
    for table in SCHEMAS:
        with expect(RecordError, ConfigError):
            read_record(run, table)


#: what is done with a record, as the commands do it
USES: dict[str, Callable[[Path], Any]] = {
    "read": _read_all,
    "diagnose": lambda run: compare_and_diagnose_run(str(run), None, None, "step"),
    "compare": lambda run: compare_and_diagnose_run(str(run), str(record()), None, "step"),
    "baseline": lambda run: compare_and_diagnose_run(str(record()), str(run), str(run), "samples"),
    "what-if": lambda run: compute_metrics_under_recipe(str(run), 3, "current-e5m2"),
}
_uses = st.sampled_from(sorted(USES))


def use(run: Path, how: str) -> None:
    """Do something with a record."""
    with capture_warnings() as heard, expect(RecordError, ConfigError):
        USES[how](run)
    for text in heard:
        if "\n" in text:
            raise Finding(f"warned in lines: {text[:300]!r}")


def _values(given: tuple[str, Changes, str], folder: Path) -> None:
    table, of, how = given
    run = copied(record(), folder / "run")
    for path in sorted((run / table).glob("*.parquet"))[:1]:
        for change in of:
            path = rewritten(path, change)
    use(run, how)


def _bytes(given: tuple[str, bytes], folder: Path) -> None:
    table, content = given
    run = copied(record(), folder / "run")
    for path in sorted((run / table).glob("*.parquet"))[:1]:
        path.write_bytes(content or path.read_bytes()[:40])
    with capture_warnings(), expect(RecordError, ConfigError):
        read_record(run, table)


def _fingerprint(given: tuple[list[str], Any, str], folder: Path) -> None:
    run = copied(record(), folder / "run")
    names, value, how = given
    content: Any = fingerprint()
    inner = content
    for name in names[:-1]:
        inner = inner[name] if isinstance(inner.get(name), dict) else inner
    inner[names[-1]] = value
    (run / "attempt-0.json").write_text(json.dumps(content))
    use(run, how)


def _fingerprint_bytes(content: bytes, folder: Path) -> None:
    run = copied(record(), folder / "run")
    (run / "attempt-0.json").write_bytes(content)
    with capture_warnings(), expect(RecordError, ConfigError):
        read_record(run, "steps")


def _names(names: list[str], folder: Path) -> None:
    """Files of any name beside a record's own."""
    run = copied(record(), folder / "run")
    for name in names:
        for place in (run, run / "metrics"):
            try:
                (place / name.replace("/", "_")).touch()
            except (OSError, ValueError):
                continue
    with capture_warnings(), expect(RecordError, ConfigError):
        assert len(read_record(run, "metrics"))


def _paths() -> st.SearchStrategy[list[str]]:
    """Of an entry of the fingerprint, one or two names deep."""
    names = sorted(fingerprint())
    inner = sorted({name for of in fingerprint().values() if isinstance(of, dict) for name in of})
    deep = st.tuples(st.sampled_from(names), st.sampled_from(inner)).map(list)
    return st.one_of(st.sampled_from(names).map(lambda name: [name]), deep)


def _parts() -> st.SearchStrategy[tuple[str, bytes]]:
    def of(table: str) -> st.SearchStrategy[tuple[str, bytes]]:
        held = [path.read_bytes() for path in (record() / table).glob("*.parquet")]
        return st.tuples(st.just(table), mutated(held[:1]))

    return st.sampled_from(("metrics", "steps", "histograms")).flatmap(of)


_numbers = st.integers(-1, 10**12), st.integers(-1, 10**20), st.integers(0, 2**32)
_part_names = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=40),
    st.builds("attempt-{}-step-{}-{:08x}.parquet".format, *_numbers),
    st.builds("attempt-{}.json".format, st.integers(-1, 10**12)),
)
_of_fingerprint = st.deferred(lambda: st.tuples(_paths(), json_values(("engine", "current-hybrid")), _uses))
_of_its_bytes = st.deferred(lambda: mutated([(record() / "attempt-0.json").read_bytes()]))
_of_values = st.sampled_from(_TABLES).flatmap(lambda table: st.tuples(st.just(table), changes(list(SCHEMAS[table])), _uses))

TARGETS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any, Path], None], int]] = {
    "values of a record": (_of_values, _values, 8),
    "fingerprint's values": (_of_fingerprint, _fingerprint, 6),
    "parts": (st.deferred(_parts), _bytes, 30),
    "fingerprint": (_of_its_bytes, _fingerprint_bytes, 30),
    "names of files": (st.lists(_part_names, min_size=1, max_size=4), _names, 20),
}


def forget() -> None:
    """Remove the real record."""
    if record.cache_info().currsize:
        shutil.rmtree(record().parent)
        record.cache_clear()
