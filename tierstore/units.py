"""Parsing and formatting of sizes and durations; the life of a drive; and text that is not UTF-8."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from tierstore.errors import ConfigError

DAY_S = 86400.0
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MOST_BYTES = 2**63  # sizes are below it, in the range of signed 64-bit integers
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*|%)\s*")


def parse_size(text: str | int, *, whole: int | None = None, name: str = "size") -> int:
    """Bytes of ``text``: ``512MiB``, ``4GB``, a plain number of bytes, or a fraction of ``whole``.

    A fraction is written ``0.25`` (a number with a decimal point, at most 1) or ``25%``, and needs
    ``whole`` (bytes). ``name`` names the value in errors. Raises ConfigError.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"{name}: expected a size of at least 0 bytes, got {text}")
        return _checked(text, name)
    match = _SIZE.fullmatch(str(text))
    expected = "a size such as 512MiB, 4GB" + (", 25% or 0.25" if whole is not None else "")
    if match is None:
        raise ConfigError(f"{name}: expected {expected}, got {text!r}")
    number, unit = match.groups()
    if unit == "%" or (unit == "" and "." in number):
        fraction = float(number) / (100 if unit == "%" else 1)
        if whole is None or fraction > 1:
            raise ConfigError(f"{name}: expected {expected}, got {text!r}")
        return int(fraction * whole)
    if unit.lower() not in _UNITS:
        raise ConfigError(f"{name}: unknown unit {unit!r} in {text!r}; expected {expected}")
    return _checked(float(number) * _UNITS[unit.lower()], name)


def _checked(size: float, name: str) -> int:
    if size >= _MOST_BYTES:
        raise ConfigError(f"{name}: expected a size of less than 2^63 bytes, got {size:.20g}")
    return int(size)


def format_bytes(count: float) -> str:
    """``count`` bytes with a binary unit and three significant digits: ``256 MiB``, ``1.12 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return (
                f"{size:.0f} B"
                if unit == "B"
                else f"{size:.3g} {unit}"
                if size < 1000
                else f"{size:.0f} {unit}"
            )
        size /= 1024
    return f"{size:.3g} TiB"


def format_seconds(seconds: float) -> str:
    """A duration for people: ``850 us``, ``12.3 ms``, ``4.21 s``, ``3 min 05 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def drive_life_s(endurance_bytes: float, written_bytes: float, elapsed_s: float) -> float:
    """Seconds until a drive has written its ``endurance_bytes`` (the TBW of its warranty) at a rate of ``written_bytes`` in
    ``elapsed_s``; infinity where nothing is written.
    """
    written_per_s = written_bytes / elapsed_s if elapsed_s > 0 else 0.0
    return endurance_bytes / written_per_s if written_per_s else math.inf


def printable(text: str) -> str:
    """``text`` in UTF-8; characters without an encoding, as in file names, are escaped."""
    return text.encode(errors="backslashreplace").decode()


def is_unicode(value: object) -> bool:
    """Whether every text in ``value``, of JSON's types, is valid Unicode. Halves of surrogate pairs are not: JSON can write
    them, and Python makes them of bytes on a command line that are not UTF-8.
    """
    waiting = [value]
    while waiting:  # not recursive: values may be nested deeper than the call stack
        one = waiting.pop()
        if isinstance(one, str):
            if not one.isascii() and _HALF_PAIR.search(one):
                return False
        elif isinstance(one, Mapping):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
    return True
