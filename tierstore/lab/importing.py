"""Imports traces of other programs: reads any of several formats and writes a trace, streaming.

docs/TRACES.md describes each format and its options.
"""

from __future__ import annotations

import asyncio
import enum
import json
import os
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tierstore import config
from tierstore.errors import ConfigError, DataError
from tierstore.lab.importers import BYTE_ORDER_MARK, Importer, open_source, refuse_wide
from tierstore.lab.importers.csv_columns import CsvOptions, csv_requests
from tierstore.lab.importers.json_lines import KNOWN_FIELDS, JsonOptions, RoutingLog, TrainingJsonOptions
from tierstore.lab.importers.plain import (
    ORACLE_RECORD,
    KeyOptions,
    KeyTrace,
    TextOptions,
    oracle_general_requests,
    text_requests,
)
from tierstore.lab.importers.topk_npz import TopkImporter, TopkOptions
from tierstore.outputs import OutputKind, check_output, replacing
from tierstore.trace.files import TraceWriter, read_summary
from tierstore.trace.format import EventColumns, RecordTable, TraceHeader, TraceKind

_HEAD_BYTES = 1 << 16
_MAX_REQUESTS = 1 << 40  # a trace with more is not believed to be one


class SourceKind(enum.Enum):
    """Formats that can be imported."""

    NPZ = "npz"
    VLLM = "vllm"
    MEGATRON = "megatron"
    ORACLE_GENERAL = "oracle-general"
    CSV = "csv"
    TEXT = "text"


_NAMES = ", ".join(kind.value for kind in SourceKind)
_ROUTING_LOGS = (SourceKind.VLLM, SourceKind.MEGATRON)
#: The options of each kind, and the function that makes an importer of paths and options.
_IMPORTERS: Mapping[SourceKind, tuple[type[Any], Callable[[Sequence[Path], Any], Importer]]] = {
    SourceKind.NPZ: (TopkOptions, lambda paths, options: TopkImporter(paths[0], options)),
    SourceKind.VLLM: (JsonOptions, lambda paths, options: RoutingLog(paths, "vllm", options)),
    SourceKind.MEGATRON: (TrainingJsonOptions, lambda paths, options: RoutingLog(paths, "megatron", options)),
    SourceKind.ORACLE_GENERAL: (
        KeyOptions,
        lambda paths, options: KeyTrace(paths[0], options, oracle_general_requests),
    ),
    SourceKind.CSV: (CsvOptions, lambda paths, options: KeyTrace(paths[0], options, csv_requests)),
    SourceKind.TEXT: (TextOptions, lambda paths, options: KeyTrace(paths[0], options, text_requests)),
}


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """Summary of an import. ``total_bytes`` counts all records."""

    kind: SourceKind
    events: int
    requests: int
    steps: int
    records: int
    layers: int
    total_bytes: int
    sha256: str
    resized: int = 0  # requests whose size differs from that of their key's first request, which is used
    columns: Mapping[str, str] = field(default_factory=dict)  # the source of each value, in words


def options_of(kind: SourceKind) -> type[Any]:
    """The dataclass of a kind's options. ``tierstore.config.dotted_fields`` lists them."""
    return _IMPORTERS[kind][0]


def import_trace(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    kind: SourceKind | None = None,
    options: Mapping[str, object] | None = None,
    keys: str | os.PathLike[str] | None = None,
) -> ImportSummary:
    """Writes the trace in ``source`` to ``target``. ``kind`` None: as ``detect_kind`` says. Several sources are files of one
    routing log, each with other layers.

    ``options`` are those of the kind by name, as text or typed. ``keys``: a file for the source's name of each record, one
    a line (experts as ``layer.expert``). The target appears when it is complete. Raises DataError naming file, line or
    byte, and reason; ConfigError for an option; OSError.
    """
    paths = [Path(source)] if isinstance(source, str | os.PathLike) else [Path(path) for path in source]
    kinds = [detect_kind(path) if kind is None else kind for path in paths]
    chosen = kinds[0]
    for path, other in zip(paths, kinds, strict=True):
        if other is not chosen:
            raise DataError(f"{path}: expected {chosen.value}, as {paths[0]} is, found {other.value}")
    options_type, make = _IMPORTERS[chosen]
    loaded = config.load(options_type, None, options)
    if len(paths) > 1 and chosen not in _ROUTING_LOGS:
        logs = " or ".join(log.value for log in _ROUTING_LOGS)
        raise DataError(
            f"{paths[1]}: several sources are the layers of a routing log ({logs}), not {chosen.value}"
        )
    importer = make(paths, loaded)
    if keys is not None:
        check_output(keys, OutputKind.NAMES, sources=[*paths, target])
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    origin = f"imported from {paths[0].name}{more} ({chosen.value})"
    requests = steps = 0
    with TraceWriter(target, TraceHeader(0, policy="lru", origin=origin), sources=paths) as writer:
        for chunk in importer.chunks():
            writer.extend(chunk)
            requests += len(chunk.records)
            steps += int(np.count_nonzero(chunk.kinds == TraceKind.END_STEP))
        if requests == 0:
            raise DataError(f"{origin}: expected at least one request, found none")
        table = importer.table()
        writer.header = replace(writer.header, capacity_frames=table.total_frames, records=table)
    if keys is not None:
        with replacing(keys, OutputKind.NAMES, sources=paths) as file:
            file.writelines(f"{name}\n".encode(errors="surrogateescape") for name in importer.names())
    with Path(target).open("rb") as written:
        summary = read_summary(written)
    return ImportSummary(
        kind=chosen,
        events=summary.events,
        requests=requests,
        steps=steps,
        records=len(table),
        layers=len(np.unique(table.layers)),
        total_bytes=int(table.bytes.sum()),
        sha256=summary.sha256,
        resized=importer.resized if isinstance(importer, KeyTrace) else 0,
        columns=importer.columns(),
    )


async def import_trace_async(
    source: AsyncIterable[bytes],
    target: str | os.PathLike[str],
    *,
    name: str = "stream",
    kind: SourceKind | None = None,
    options: Mapping[str, object] | None = None,
    keys: str | os.PathLike[str] | None = None,
) -> ImportSummary:
    """Awaitable ``import_trace`` of a stream of bytes, such as an upload. The event loop never waits for a disk.

    aiofiles collects the stream in a temporary file beside ``target``, since importers read a source more than once;
    a thread imports it. ``name``: the file name that errors and the header give the source. An import whose task is
    cancelled still runs to its end. Raises what ``import_trace`` and ``source`` raise; ConfigError for ``name``.
    """
    from aiofiles import open as open_file
    from aiofiles.tempfile import TemporaryDirectory

    if Path(name).name != name or name in ("", ".."):
        raise ConfigError(f"name: expected a file name without directories, got {name!r}")
    async with TemporaryDirectory(dir=Path(target).parent) as folder:
        path = Path(folder) / name
        async with open_file(path, "wb") as file:
            async for part in source:
                await file.write(part)
        return await asyncio.to_thread(import_trace, path, target, kind=kind, options=options, keys=keys)


def write_trace(
    target: str | os.PathLike[str], table: RecordTable, chunks: Iterator[EventColumns], *, origin: str
) -> None:
    """Writes events to ``target`` as a trace in which everything fits."""
    header = TraceHeader(table.total_frames, policy="lru", records=table, origin=origin)
    with TraceWriter(target, header) as writer:
        for chunk in chunks:
            writer.extend(chunk)


def detect_kind(source: str | os.PathLike[str]) -> SourceKind:
    """The kind of ``source`` by its first bytes (unpacked). Raises DataError for no known kind."""
    path = Path(source)
    with open_source(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        raise DataError(f"{path}: expected a trace, found an empty file")
    if head.startswith(b"PK\x03\x04"):
        return SourceKind.NPZ
    text = head.removeprefix(BYTE_ORDER_MARK)
    if text.lstrip().startswith(b"{"):
        return _json_kind(path, text)
    if _is_oracle_general(head):
        return SourceKind.ORACLE_GENERAL
    refuse_wide(path, head)
    if b"\0" in head:
        raise DataError(f"{path}: a binary file of no known kind; expected one of {_NAMES}")
    first = head.split(b"\n", 1)[0]
    return SourceKind.CSV if b"," in first or b"\t" in first.strip() else SourceKind.TEXT


def _json_kind(path: Path, head: bytes) -> SourceKind:
    for line in head.splitlines()[:100]:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if isinstance(row, dict) and row.get("type") != "meta":
            for kind in (SourceKind.MEGATRON, SourceKind.VLLM):
                fields = KNOWN_FIELDS[kind.value]
                if fields["layer"][0] in row and any(
                    name in row for name in (*fields["experts"], *fields["counts"])
                ):
                    return kind
            break
    raise DataError(
        f"{path}: JSON lines of an unknown routing log; give the kind ({_NAMES}) and its fields as options"
    )


def _is_oracle_general(head: bytes) -> bool:
    """Whether the head looks like oracleGeneral records: next accesses lie ahead, and times never decrease."""
    rows = np.frombuffer(head[: len(head) // ORACLE_RECORD.itemsize * ORACLE_RECORD.itemsize], ORACLE_RECORD)
    if b"\0" not in head or not len(rows):
        return False
    ahead = (rows["next"] == -1) | ((rows["next"] > np.arange(len(rows))) & (rows["next"] < _MAX_REQUESTS))
    return bool(ahead.all() and (np.diff(rows["time"].astype(np.int64)) >= 0).all())
