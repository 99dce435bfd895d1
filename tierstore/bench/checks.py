"""What benchmarks refuse before they measure: options that make no sense, a directory that exists, too little disk."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from tierstore.errors import ConfigError
from tierstore.machine import existing_parent


def at_least(least: int, **values: float) -> None:
    """Raises ConfigError for the first of ``values`` that is below ``least``, by its name."""
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name}: expected at least {least}, got {value}")


def more_than_0(**values: float) -> None:
    """Raises ConfigError for the first of ``values`` that is not above 0, by its name."""
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"{name}: expected more than 0, got {value}")


def refuse_existing(directory: Path) -> None:
    """Raises ConfigError where ``directory`` exists: a benchmark removes the whole of its work directory."""
    if directory.exists():
        raise ConfigError(f"store: {directory} exists; the benchmark wants a directory of its own")


@contextlib.contextmanager
def work_directory(directory: Path) -> Iterator[Path]:
    """Makes ``directory``, and removes it with all that is in it. Raises ConfigError where it exists, OSError."""
    refuse_existing(directory)
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def require_free(directory: Path, nbytes: int, what: str) -> None:
    """Raises ConfigError where the disk that ``directory`` will lie on has less than ``nbytes`` for ``what``."""
    parent = existing_parent(directory)
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise ConfigError(f"store: {what} {nbytes} bytes of {parent}, which has {free} free")
