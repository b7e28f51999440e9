"""Read run records. If a file is damaged or foreign, warn about it and read everything else."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError, RecordError, warn
from . import migration
from .parts import (
    SHARED,
    EffectiveParts,
    list_parts_of_table,
    list_steps_of_rows,
    may_contain_step,
    read_effective_parts,
    read_part_columns,
    warn_of_damaged_parts,
)
from .schema import SCHEMAS, SECTIONS, STATUS, Part, make_arrow_schema, parse_attempt_number
from .storage import FolderStorage, find_link_out_of_folder

Address = str | os.PathLike[str]

_FINGERPRINTS = "attempt-*.json"


def find_record(address: Address) -> FolderStorage:
    """Return the record at `address` (a path or any fsspec address), or the only record in a folder below it.

    Raises:
        RecordError: `address` contains no record or several.
    """
    try:
        root = FolderStorage(address)
        folders = (
            [root]
            if root.has_matching_file(_FINGERPRINTS) and _attempts(root)
            else root.find_folders_with_file(_FINGERPRINTS)
        )
        found = [p for p in folders if _attempts(p)]
    except ConfigError as error:
        raise RecordError(str(error)) from None
    except Exception as error:  # every driver of a remote file system has its own errors
        raise RecordError(f"{address} cannot be read: {error}") from None
    if not found:
        raise RecordError(f"{root} holds no run record (a folder with attempt-0.json){_links_in(root)}")
    if len(found) > 1:
        raise RecordError(f"{root} holds {len(found)} run records; name one of {', '.join(map(str, found[:4]))}")
    _refuse_links(root, found[0])
    return found[0]


def _links_in(root: FolderStorage) -> str:
    """Return a hint that links to folders were not followed, or an empty string if there are no links."""
    names = (
        [name for name, kind in root.list_entries() if kind == "link"] if root.is_local and os.path.isdir(str(root)) else []
    )
    folders = [root.path(name) for name in sorted(names) if os.path.isdir(root.path(name))]
    return f". Links in it are not followed: name {folders[0]} itself" if folders else ""


def _refuse_links(root: FolderStorage, run: FolderStorage) -> None:
    """Refuse a record if a link in it leads out of the folder that the user named. The FP8 tab has the same rule.

    Raises:
        RecordError: the record has such a link.
    """
    if not root.is_local:
        return
    named = FolderStorage(os.path.realpath(root.path("")))
    try:
        bad = find_link_out_of_folder(named, run.path("").removeprefix(root.path("")).strip("/"))
    except OSError as error:
        raise RecordError(f"{run} cannot be read: {error}") from None
    if bad:
        raise RecordError(f"{bad} of the record {run} is a link out of {root}; replace the link with the files it leads to")


def read_fingerprint(run: Address) -> dict[str, Any]:
    """Return the latest readable fingerprint of a record, or an empty dict if no fingerprint is readable.

    Raises:
        RecordError: the record was written by a release with another schema.
    """
    run = FolderStorage(run)
    for attempt in sorted(_attempts(run), reverse=True):
        name = f"attempt-{attempt}.json"
        try:
            run.refuse_pipes_and_devices(name)
            content = json.loads(run.read_file(name))
            if not isinstance(content, dict):
                raise ValueError("a JSON object is expected")
        except (OSError, ValueError, RecursionError) as error:
            warn(f"{run.path(name)} is not a fingerprint: {error}")
            continue
        if content.get("schema_version") not in migration.READABLE:
            raise RecordError(
                f"{run.path(name)} has schema version {content.get('schema_version')}; "
                f"this release reads {', '.join(map(str, migration.READABLE))}"
            )
        found = migration.migrate_fingerprint(content)
        if odd := [section for section in SECTIONS if not isinstance(found.get(section, {}), dict)]:
            warn(f"{run.path(name)} is read without {', '.join(odd)}: a JSON object is expected there")
        return {section: value for section, value in found.items() if section not in odd}
    return {}


def read_status(run: FolderStorage) -> dict[str, Any]:
    """Return the content of the run's status file.

    Raises:
        RecordError: there is no status file, or it cannot be read.
    """
    try:
        run.refuse_pipes_and_devices(STATUS)
        content = json.loads(run.read_file(STATUS))
    except FileNotFoundError:
        raise RecordError(f"{run} has no {STATUS}: the run has not sampled yet") from None
    except Exception as error:  # damaged files and every driver have their own errors
        raise RecordError(f"{run.path(STATUS)} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RecordError(f"{run.path(STATUS)} cannot be read: a JSON object is expected")
    return content


def read_record(
    run: Address,
    table: str = "metrics",
    columns: Sequence[str] | None = None,
    where: Mapping[str, Any] | None = None,
    steps: Collection[int] | None = None,
) -> pl.DataFrame:
    """Return a table of a run's record, in order of steps.

    If a step was trained twice, the later attempt's rows count.

    Args:
        run: the record, or a folder above it. A path or any fsspec address.
        table: `metrics`, `what_if`, `replayed`, `outputs`, `copies`, `block_scales`, `verification`, `replicas`, `states`,
            `state_histograms`, `gradients`, `activations`, `activation_histograms`, `histograms`, `steps` or `validation`.
            docs/record.md lists their columns.
        columns: names of the columns to read, or None for all.
        where: values that columns must have, such as `{"role": "weight"}`, or None for any.
        steps: numbers of the steps to read, or None for all.

    Returns:
        A polars frame with one row for each operand and sampled step. In `outputs`, there is a row for each GEMM product and
        sampled step. In `steps`, there is a row for each step, and in `validation` for each loss of an evaluation.

    Raises:
        RecordError: there is no record, there are several, or a release with another schema wrote it.
        ConfigError: there is no such table or column.

    Example:
        >>> where = {"layer": "layers.0.fc1", "role": "weight"}
        >>> rows = read_record("runs/bad", columns=["step", "underflow_pct"], where=where)
        >>> rows.columns, rows["step"].to_list()[:3]
        (['step', 'underflow_pct'], [0, 10, 20])
    """
    if table not in SCHEMAS:
        raise ConfigError(f"table is {table!r}; choose from {', '.join(SCHEMAS)}")
    if unknown := sorted({*(columns or ()), *(where or ())} - set(SCHEMAS[table])):
        raise ConfigError(f"the table {table} has no column {unknown[0]}; it has {', '.join(SCHEMAS[table])}")
    found = find_record(run)
    read_fingerprint(found)
    return read_table_rows(found, table, columns, where, steps)


def read_table_rows(
    run: Address,
    table: str,
    columns: Sequence[str] | None = None,
    where: Mapping[str, Any] | None = None,
    steps: Collection[int] | None = None,
) -> pl.DataFrame:
    """Return rows of a table, in order of steps. If attempts overlap, the latest attempt's rows count.

    Args:
        table: `metrics`, `what_if`, `replayed`, `outputs`, `copies`, `block_scales`, `verification`, `replicas`,
            `states`, `state_histograms`, `gradients`, `activations`, `activation_histograms`, `histograms`, `steps` or
            `validation`.
        columns: names of the columns to read, or None for all.
        where: values that columns must have, such as `{"step": 120}` or `{"layer": "decoder.layers.3.mlp.linear_fc2"}`.
        steps: numbers of the steps to read, or None for all. Rows of other steps stay in memory for one part at a time only.
    """
    wanted, where, run = list(columns or SCHEMAS[table]), dict(where or {}), FolderStorage(run)
    keys = {"attempt", "step", *(("layer", "role", "recipe", "rounded") if table in SHARED else ())}
    schema = make_arrow_schema(table, {*wanted, *where, *keys})
    only = None if steps is None else pa.array(sorted(steps), pa.int64())
    step = where.get("step")

    def read(part: Part) -> tuple[set[int], pa.Table]:
        rows = read_part_columns(run, table, part, schema.names, step=step)[0]
        samples = list_steps_of_rows(rows)
        rows = rows if only is None else rows.filter(pc.is_in(rows["step"], only))
        return samples, _matching(rows, where)

    owners, found = EffectiveParts(table), list[tuple[Part, set[int], pa.Table]]()

    def use(part: Part, read: tuple[set[int], pa.Table]) -> None:
        samples, rows = read
        new = owners.add_part(part, samples)
        found.append((part, new, _without(rows, samples - new)))

    listed = list_parts_of_table(run, table)
    parts = listed if step is None else [part for part in listed if may_contain_step(table, part, step)]
    warn_of_damaged_parts(run, table, read_effective_parts(run, table, read, use, owners, parts))
    latest = [_without(rows, {s for s in new if not owners.is_latest_part_of_step(part, s)}) for part, new, rows in found]
    none = pa.Table.from_batches([], schema)  # schema.empty_table() would import pandas, which takes half a second
    frame = pl.concat([_frame(none), *map(_frame, latest)])
    if not frame["step"].is_sorted():
        frame = frame.sort("step", maintain_order=True)
    if table in SHARED:  # two processes may have added the same rows; exact rows take precedence over rounded rows
        frame = frame.sort("step", "rounded", maintain_order=True)
        frame = frame.unique(["step", "layer", "role", "recipe"], keep="first", maintain_order=True)
    return frame.select(wanted)


def read_step_scalars(run: Address, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Return scalars of each step, such as the loss, in order of steps.

    Args:
        columns: names of the columns to read, or None for all.
    """
    return read_table_rows(run, "steps", columns)


def _frame(rows: pa.Table) -> pl.DataFrame:
    """Return a frame with plain string columns. Copy each value of a dictionary once, not once for each row."""
    return pl.DataFrame(pl.from_arrow(rows)).with_columns(pl.col(pl.Categorical).cast(pl.String))


def _matching(rows: pa.Table, where: Mapping[str, Any]) -> pa.Table:
    for name, value in where.items():
        rows = rows.filter(pc.equal(rows[name], value))
    return rows


def _without(rows: pa.Table, steps: Collection[int]) -> pa.Table:
    return rows.filter(pc.invert(pc.is_in(rows["step"], pa.array(steps, pa.int64())))) if steps else rows


def _attempts(run: FolderStorage) -> list[int]:
    return [a for name in run.list_names() if (a := parse_attempt_number(name)) is not None]
