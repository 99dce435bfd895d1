"""Other people's traces: any of several formats in, a trace of ours out, streamed.

What each format holds and which options it has is in docs/TRACES.md.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tierstore import config
from tierstore.errors import DataError
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
from tierstore.trace.format import EventColumns, RecordTable, TraceHeader, TraceKind
from tierstore.trace.reader import read_summary
from tierstore.trace.writer import TraceWriter

_HEAD_BYTES = 1 << 16
_MAX_REQUESTS = 1 << 40  # that a trace is believed to have


class SourceKind(enum.Enum):
    """Formats that can be imported."""

    NPZ = "npz"
    VLLM = "vllm"
    MEGATRON = "megatron"
    ORACLE_GENERAL = "oracle-general"
    CSV = "csv"
    TEXT = "text"


_ROUTING_LOGS = (SourceKind.VLLM, SourceKind.MEGATRON)
_OPTIONS: Mapping[SourceKind, type[Any]] = {
    SourceKind.NPZ: TopkOptions,
    SourceKind.VLLM: JsonOptions,
    SourceKind.MEGATRON: TrainingJsonOptions,
    SourceKind.ORACLE_GENERAL: KeyOptions,
    SourceKind.CSV: CsvOptions,
    SourceKind.TEXT: TextOptions,
}


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """What was written. ``requests`` are units of accesses, ``total_bytes`` those of all records."""

    kind: SourceKind
    events: int
    requests: int
    steps: int
    records: int
    layers: int
    total_bytes: int
    sha256: str
    resized: int = 0  # requests whose size was not that of their key's first, which counts
    columns: Mapping[str, str] = field(
        default_factory=dict
    )  # where the source has what was read of it, in words


def options_of(kind: SourceKind) -> type[Any]:
    """The dataclass of a kind's options; ``tierstore.config.dotted_fields`` lists them."""
    return _OPTIONS[kind]


def import_trace(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    kind: SourceKind | None = None,
    options: Mapping[str, object] | None = None,
    keys: str | os.PathLike[str] | None = None,
) -> ImportSummary:
    """Writes the trace in ``source`` to ``target``; ``kind`` None: what ``detect_kind`` says. Several sources are files
    of one routing log, each of which has other layers.

    ``options`` are those of the kind by name, as text or typed. ``keys``: a file that gets the source's name
    of each record, one a line (experts as ``layer.expert``). The target appears when it is whole. Raises
    DataError naming file, line or byte, and reason; ConfigError for an option; OSError.
    """
    paths = [Path(source)] if isinstance(source, str | os.PathLike) else [Path(path) for path in source]
    chosen = _common_kind(paths) if kind is None else kind
    importer = _importer(paths, chosen, config.load(_OPTIONS[chosen], None, options))
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    origin = f"imported from {paths[0].name}{more} ({chosen.value})"
    if keys is not None:
        check_output(keys, OutputKind.NAMES, sources=[*paths, target])
    summary = _written(Path(target), importer, chosen, origin, paths)
    if keys is not None:
        with replacing(keys, OutputKind.NAMES, sources=paths) as file:
            file.writelines(f"{name}\n".encode(errors="surrogateescape") for name in importer.names())
    return summary


def _common_kind(paths: Sequence[Path]) -> SourceKind:
    kinds = [detect_kind(path) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind is not kinds[0]:
            raise DataError(f"{path}: expected {kinds[0].value}, as {paths[0]} is, found {kind.value}")
    return kinds[0]


def _importer(paths: Sequence[Path], kind: SourceKind, options: Any) -> Importer:
    path, *others = paths
    if others and kind not in _ROUTING_LOGS:
        logs = " or ".join(log.value for log in _ROUTING_LOGS)
        raise DataError(
            f"{others[0]}: several sources are the layers of a routing log ({logs}), not {kind.value}"
        )
    found: dict[str, str] = {}
    match kind:
        case SourceKind.NPZ:
            return TopkImporter(path, options)
        case SourceKind.VLLM | SourceKind.MEGATRON:
            return RoutingLog(paths, kind.value, options)
        case SourceKind.ORACLE_GENERAL:
            where = {"key": "object", "size": "size", "time": "not read"}
            return KeyTrace(options, oracle_general_requests(path, options), where)
        case SourceKind.CSV:
            return KeyTrace(options, csv_requests(path, options, found), found)
        case SourceKind.TEXT:
            return KeyTrace(options, text_requests(path, options), {"key": "line", "size": "none"})


def _written(
    target: Path, importer: Importer, kind: SourceKind, origin: str, sources: Sequence[Path]
) -> ImportSummary:
    requests = steps = 0
    with TraceWriter(target, TraceHeader(0, policy="lru", origin=origin), sources=sources) as writer:
        for chunk in importer.chunks():
            writer.extend(chunk)
            requests += len(chunk.records)
            steps += int(np.count_nonzero(chunk.kinds == TraceKind.END_STEP))
        if requests == 0:
            raise DataError(f"{origin}: expected at least one request, found none")
        table = importer.table()
        writer.header = replace(writer.header, capacity_frames=table.total_frames, records=table)
    with target.open("rb") as file:
        summary = read_summary(file)
    return ImportSummary(
        kind=kind,
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


def write_trace(
    target: str | os.PathLike[str], table: RecordTable, chunks: Iterator[EventColumns], *, origin: str
) -> None:
    """Writes events to ``target``, as a trace in which everything fits."""
    header = TraceHeader(table.total_frames, policy="lru", records=table, origin=origin)
    with TraceWriter(target, header) as writer:
        for chunk in chunks:
            writer.extend(chunk)


def detect_kind(source: str | os.PathLike[str]) -> SourceKind:
    """What ``source`` looks like, from its first bytes (unpacked). Raises DataError if like nothing known."""
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
        raise DataError(f"{path}: a binary file of no known kind; expected one of {_names()}")
    first = head.split(b"\n", 1)[0]
    return SourceKind.CSV if b"," in first or b"\t" in first.strip() else SourceKind.TEXT


def _names() -> str:
    return ", ".join(kind.value for kind in SourceKind)


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
        f"{path}: JSON lines of no known routing log; name the kind ({_names()}) and its fields as options"
    )


def _is_oracle_general(head: bytes) -> bool:
    """Whether the head reads as such records: next accesses lie ahead, and times do not fall."""
    rows = np.frombuffer(head[: len(head) // ORACLE_RECORD.itemsize * ORACLE_RECORD.itemsize], ORACLE_RECORD)
    if b"\0" not in head or not len(rows):
        return False
    ahead = (rows["next"] == -1) | ((rows["next"] > np.arange(len(rows))) & (rows["next"] < _MAX_REQUESTS))
    return bool(ahead.all() and (np.diff(rows["time"].astype(np.int64)) >= 0).all())
