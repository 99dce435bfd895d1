"""The results of a benchmark as one JSON document: for programs, for the report, and for comparison with later runs.

::

    Document              one run of one benchmark: command, options, machine, times, and
    ├── Measurement ..    one thing measured: name, parameters, unit, samples or their summary, target
    └── figures           the output of ``--json``

Every benchmark creates its measurements with ``measured`` (clocks and counters), ``counted`` (exact, without noise) or
``derived`` (such as ratios). Names are stable: two documents are compared by benchmark, name and parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from tierstore import __version__, machine
from tierstore.config import as_dict, from_dict
from tierstore.errors import ConfigError, DataError
from tierstore.outputs import OutputKind, write_output
from tierstore.stats import percentile
from tierstore.units import format_bytes, format_seconds

FORMAT_VERSION = 1
_FORMAT = "tierstore-bench"
_SHOWN_UNITS = ("s", "bytes", "bytes/s", "ratio")  # which ``shown`` includes, or needs not
_NOTHING: Mapping[str, float | str] = MappingProxyType({})
#: The type of each key's value, in the file and in errors.
_KINDS = {
    **dict.fromkeys(("tool_version", "bench", "started", "ended"), (str, "text")),
    **dict.fromkeys(("options", "machine", "figures"), (dict, "a table")),
    "measurements": (list, "a list"),
}


class Better(StrEnum):
    """Which direction is better."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"  # information


class Origin(StrEnum):
    """Where a number comes from."""

    MEASURED = "measured"
    COUNTED = "counted"  # exact: it has no noise
    DERIVED = "derived"  # computed from measurements


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One thing that was measured. ``samples`` may be empty if only their summary was kept.

    ``unit`` is the unit of the numbers: ``s``, ``bytes``, ``bytes/s``, ``ratio``, or a plural noun (``collectives``).
    ``low`` and ``high`` are the quartiles of ``count`` samples. ``target``: the least value if higher is better, else the
    greatest. Raises ConfigError for contradictions.
    """

    name: str
    parameters: Mapping[str, float | str] = field(default_factory=dict)
    unit: str
    better: Better = Better.NEITHER
    evidence: Origin = Origin.MEASURED
    samples: tuple[float, ...] = ()
    count: int
    median: float
    low: float
    high: float
    target: float | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.unit:
            raise ConfigError("name, unit: expected text")
        if self.count < 1 or (self.samples and len(self.samples) != self.count):
            raise ConfigError(f"count: expected the number of samples, got {self.count}")
        if not self.low <= self.median <= self.high:
            raise ConfigError(f"median: {self.median} is not between {self.low} and {self.high}")
        if self.target is not None and self.better is Better.NEITHER:
            raise ConfigError("target: needs a direction (better: higher or lower)")

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None without one."""
        if self.target is None:
            return None
        return self.median >= self.target if self.better is Better.HIGHER else self.median <= self.target

    @property
    def label(self) -> str:
        """The name with its parameters: ``step (run=tiered)``."""
        given = ", ".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{self.name} ({given})" if given else self.name

    @property
    def texts(self) -> dict[str, str]:
        """The row of a table for people."""
        unit = "" if self.unit in _SHOWN_UNITS else f" {self.unit}"
        median, low, high = (f"{shown(one, self.unit)}{unit}" for one in (self.median, self.low, self.high))
        target = "-"
        if self.target is not None:
            sign = "at least" if self.better is Better.HIGHER else "at most"
            target = f"{sign} {shown(self.target, self.unit)}{unit}: {'met' if self.met else 'MISSED'}"
        return {
            "measurement": self.label,
            "median": median,
            "quartiles": "-" if self.count == 1 else f"{low} to {high}",
            "samples": str(self.count),
            "better": "-" if self.better is Better.NEITHER else self.better.value,
            "target": target,
            "from": self.evidence.value,
        }

    @property
    def key(self) -> tuple[object, ...]:
        """The key by which two documents are compared."""
        return (self.name, self.unit, tuple(sorted(self.parameters.items())))


def measured(
    name: str,
    samples: float | Sequence[float],
    unit: str,
    better: Better | None = None,
    *,
    parameters: Mapping[str, float | str] = _NOTHING,
    target: float | None = None,
    evidence: Origin = Origin.MEASURED,
) -> Measurement:
    """A measurement of one or several ``samples``. ``better`` None: lower for times, higher for rates, else neither.

    Raises ConfigError if there are none, or one is not finite.
    """
    values = tuple(map(float, [samples] if isinstance(samples, int | float) else samples))
    if not values or not all(map(math.isfinite, values)):
        raise ConfigError(f"{name}: expected finite samples, got {samples}")
    if better is None:
        better = Better.LOWER if unit == "s" else Better.HIGHER if unit.endswith("/s") else Better.NEITHER
    return Measurement(
        name=name,
        parameters=dict(parameters),
        unit=unit,
        better=better,
        evidence=evidence,
        samples=values,
        count=len(values),
        median=percentile(values, 50),
        low=percentile(values, 25),
        high=percentile(values, 75),
        target=target,
    )


#: An exact number: bytes moved, messages sent.
counted = partial(measured, evidence=Origin.COUNTED)
#: A number computed from measurements, such as a ratio: one value, or one per round.
derived = partial(measured, evidence=Origin.DERIVED)


def shown(value: float, unit: str) -> str:
    """``value`` for people: ``12.3 ms``, ``1.2 GiB/s``, ``0.981``."""
    if unit == "s":
        return format_seconds(value) if value >= 0 else f"-{format_seconds(-value)}"
    if unit in ("bytes", "bytes/s"):
        return format_bytes(value) + unit.removeprefix("bytes")
    return f"{value:.3f}" if unit == "ratio" else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Where the benchmark ran. ``filesystem`` and ``device`` are those of the measured directory, ``none`` without one."""

    processor: str
    cores: int
    memory_bytes: int
    kernel: str
    filesystem: str
    device: str
    torch: str


def machine_facts(directory: Path | None = None) -> MachineFacts:
    """The facts of this machine. ``directory`` need not exist: its nearest existing parent is used."""
    parent = None if directory is None else machine.existing_parent(directory)
    return MachineFacts(
        processor=machine.processor(),
        cores=machine.cores(),
        memory_bytes=machine.memory().usable_bytes,
        kernel=machine.kernel(),
        filesystem="none" if parent is None else machine.disk(parent).filesystem,
        device="none" if parent is None else machine.block_device(parent),
        torch=version("torch"),
    )


@dataclass(frozen=True, kw_only=True)
class Document:
    """One run of one benchmark. Times are UTC, ISO 8601."""

    bench: str
    options: Mapping[str, float | str]
    machine: MachineFacts
    started: str
    ended: str
    measurements: tuple[Measurement, ...]
    figures: Mapping[str, object] = field(default_factory=dict)
    tool_version: str = __version__

    def __post_init__(self) -> None:
        seen: set[tuple[object, ...]] = set()
        for measurement in self.measurements:
            if measurement.key in seen:
                raise ConfigError(f"measurements: {measurement.label}: given twice")
            seen.add(measurement.key)


def now() -> str:
    """The present time, in the format of documents."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def save_document(document: Document, path: Path) -> None:
    """Write ``document``, whole or not at all. Raises OSError."""
    plain = {
        "format": _FORMAT,
        "format_version": FORMAT_VERSION,
        **{key: getattr(document, key) for key in _KINDS},
        "options": dict(document.options),
        "machine": as_dict(document.machine),
        "measurements": [{**as_dict(one), "met": one.met} for one in document.measurements],
    }
    write_output(path, OutputKind.DOCUMENT, json.dumps(plain, indent=1, allow_nan=False) + "\n")


def load_document(path: Path) -> Document:
    """The inverse of ``save_document``. Raises DataError naming the file and what is wrong with it, OSError."""
    try:
        plain = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path}: not a benchmark's document: not JSON: {error}") from error
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        raise DataError(f"{path}: not a benchmark's document (see --save)")
    if plain.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{path}: expected a benchmark's document of version {FORMAT_VERSION}, "
            f"got {plain.get('format_version')!r}"
        )
    wanted = {"format", "format_version", *_KINDS}
    if wrong := sorted(wanted.symmetric_difference(plain)):
        raise DataError(f"{path}: {wrong[0]}: {'missing' if wrong[0] in wanted else 'unknown'} key")
    try:
        for key, (kind, expected) in _KINDS.items():
            if not isinstance(plain[key], kind):
                raise ConfigError(f"{key}: expected {expected}, got {plain[key]!r}")
        given = {key: plain[key] for key in _KINDS}
        given["machine"] = from_dict(MachineFacts, plain["machine"], origin="machine")
        given["measurements"] = tuple(_measurements(plain["measurements"]))
        return Document(**given)
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from error


def _measurements(items: Sequence[object]) -> Iterable[Measurement]:
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ConfigError(f"measurements[{number}]: expected a table")
        given = {key: value for key, value in item.items() if key != "met"}
        yield from_dict(Measurement, given, origin=f"measurements[{number}]")
