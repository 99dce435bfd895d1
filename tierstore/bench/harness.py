"""What all benchmarks share: options, results, tables, ratios, targets, and checks before the work.

A benchmark is one file of this package, with a frozen dataclass derived from ``Benchmark``: its fields, declared by
``tierstore.config.option``, are the options of ``tierstore bench NAME``, its docstring is the help, and ``run`` measures and
returns ``Found``. The command line (``tierstore.cli.bench``) derives the options, prints the tables, and implements
``--json``, ``--save``, ``--compare`` and ``--html``. Every module of this package that declares such a class is a benchmark:
there is no list of them.

``Found.figures`` is the object of ``--json``. The end of a key is the unit of its number: ``_s``, ``_bytes``,
``_bytes_per_s``, ``_per_s``, ``_ratio``, ``_count``. Tables are views of such objects, formatted by these units.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tierstore.bench.documents import Measurement, Origin, shown
from tierstore.config import option
from tierstore.errors import ConfigError
from tierstore.units import parse_size

#: What a key ends in to name its unit.
_UNIT = re.compile("(_bytes)?(_per)?_s$|_(bytes|count|ratio)$")
#: Where benchmarks make their stores if ``--store`` is not given.
WORK_DIRECTORY = Path("tierstore-bench")


# Options ----------------------------------------------------------------------------------------------------


def size_option(default: str, text: str = "", **how: Any) -> Any:
    """An option in bytes whose default is text such as 512MiB."""
    return option(parse_size(default), text, size=True, typed=default, **how)


def store_option(**how: Any) -> Any:
    """``--store``: the benchmark's work directory."""
    return option(WORK_DIRECTORY, "Directory to create, measure in, and remove.", shown=False, **how)


class Benchmark(ABC):
    """The base class of all benchmarks, which are frozen dataclasses of their options."""

    @abstractmethod
    def run(self, progress: Progress) -> Found:
        """Run the benchmark. Raises ConfigError, OSError."""

    @property
    def measured_in(self) -> Path | None:
        """The directory whose file system and device a document names; None if no disk is measured."""
        store = getattr(self, "store", None)
        return store if isinstance(store, Path) else None

    @property
    def saved_as(self) -> str | None:
        """The benchmark's name in documents, if it is not the command's."""
        return None


class Progress:
    """Receives a benchmark's progress. This one is silent."""

    def say(self, text: str) -> None:
        """Show one line for people."""

    def update(self, done: int, total: int, fields: Mapping[str, object]) -> None:
        """``done`` of ``total`` are done; ``fields`` are shown beside it."""

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """In the block, an interrupt does not end the program; the yielded function says whether there was one."""
        yield lambda: False


# What was found ---------------------------------------------------------------------------------------------


def unit_of(key: str) -> str:
    """The unit in the end of a figure's key; empty if it has none."""
    for end, unit in (("bytes_per_s", "bytes/s"), ("bytes", "bytes"), ("_per_s", "/s"), ("ratio", "ratio")):
        if key.endswith(end):
            return unit
    return "s" if key.endswith("_s") else ""


def text_of(key: str, value: object) -> str:
    """Format ``value`` for people by its ``key``."""
    if value is None:
        return "-"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value.value if isinstance(value, Enum) else value)
    unit = unit_of(key)
    if unit in ("s", "bytes", "bytes/s", "ratio"):
        return shown(value, unit)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}{unit}"


@dataclass(frozen=True)
class FigureTable:
    """A table for people. ``columns``: the key of a row's value by heading (``latency.p50_s`` for a value of a nested
    object). A value that is missing or None is shown as a dash.
    """

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, object]]

    @property
    def cells(self) -> list[list[str]]:
        return [[text_of(key, _at(row, key)) for key in self.columns.values()] for row in self.rows]

    @staticmethod
    def of_keys(title: str, rows: Sequence[Mapping[str, object]], *keys: str, **headings: str) -> FigureTable:
        """A column for each of ``keys``: under its name in ``headings``, or under the key without its unit."""
        columns = {headings.get(key, _heading(key)): key for key in keys}
        return FigureTable(title, columns, rows)

    @staticmethod
    def transposed(
        title: str, rows: Mapping[str, str], objects: Mapping[str, Mapping[str, object]]
    ) -> FigureTable:
        """One column for each of ``objects``, one row for each of ``rows`` (heading and key)."""
        shown = [
            {"": heading, **{name: text_of(key, _at(one, key)) for name, one in objects.items()}}
            for heading, key in rows.items()
        ]
        return FigureTable(title, {"": "", **{name: name for name in objects}}, shown)


def _heading(key: str) -> str:
    return _UNIT.sub("", key.rpartition(".")[2]).replace("_", " ")


def _at(row: Mapping[str, object], key: str) -> object:
    if key in row:
        return row[key]
    outer, _, inner = key.partition(".")
    found = row.get(outer)
    return found.get(inner) if isinstance(found, Mapping) else None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a benchmark found: ``figures`` for programs, ``measurements`` for documents, ``shown`` (tables, and lines between
    them) for people; if it is empty, they see all measurements. ``failed``: a check failed; the exit status is 1.
    """

    figures: Mapping[str, object]
    measurements: Sequence[Measurement]
    shown: Sequence[FigureTable | str] = ()
    failed: bool = False

    def summary(self) -> FigureTable:
        """The measurements: all of them, or, if the benchmark has its own tables, only those with a target and ratios of the
        whole run.
        """
        rows = [
            one.texts
            for one in self.measurements
            if not self.shown
            or one.target is not None
            or (one.evidence is Origin.DERIVED and not one.parameters)
        ]
        return FigureTable(
            "",
            {"": "measurement", "median": "median", "quartiles": "quartiles", "target": "target"},
            rows,
        )


def prefixed(prefix: str, figures: Mapping[str, object]) -> dict[str, object]:
    """``figures`` with ``prefix`` before each key."""
    return {f"{prefix}{key}": value for key, value in figures.items()}


def ratios(numerators: Iterable[float], denominators: Iterable[float], scale: float = 1.0) -> list[float]:
    """``scale * a / b`` for the two measurements of each round."""
    return [scale * a / b for a, b in zip(numerators, denominators, strict=True)]


# What is refused before the work ----------------------------------------------------------------------------


def refuse_existing(directory: Path) -> None:
    """Raise ConfigError if ``directory`` exists, since a benchmark removes its whole work directory."""
    if directory.exists():
        raise ConfigError(f"store: {directory} exists; the benchmark needs a directory of its own")


@contextlib.contextmanager
def work_directory(directory: Path) -> Iterator[Path]:
    """Create ``directory``, and remove it with its content at exit. Raises ConfigError if it exists, OSError."""
    refuse_existing(directory)
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
