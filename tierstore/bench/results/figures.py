"""What a benchmark found, as types; and as the JSON that ``--json`` prints and ``--save`` keeps.

A result is a frozen dataclass that derives from ``Figures``, and its fields are the keys of the JSON object. Each name
says its unit: ``_s``, ``_bytes``, ``_bytes_per_s``, ``_ratio``, ``_count`` (a test goes through all of these types). A
field's metadata says where its keys differ: ``IF_ANY``, ``INTERNAL``, ``named`` or ``prefixed``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path

#: No key where the value is None; another field that is None is null.
IF_ANY: Mapping[str, object] = {"if_any": True}
#: No key: the field is for the measurements and the table.
INTERNAL: Mapping[str, object] = {"internal": True}


def prefixed(prefix: str) -> Mapping[str, object]:
    """The value's own keys, behind ``prefix``, stand among those of the object that has it; none do for None."""
    return {"prefix": prefix}


def named(key: str) -> Mapping[str, object]:
    """A key that cannot be a field's name, or that the JSON has had from the beginning. ``{unit}`` in it stands for the
    value of the field ``unit``.
    """
    return {"key": key}


@dataclasses.dataclass(frozen=True)
class Figures:
    """The base of all result types, which are frozen dataclasses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StallTime(Figures):
    """Seconds of a step that were stalled for one cause."""

    cause: str
    step_stall_s: float


def to_json(result: Figures) -> dict[str, object]:
    """``result`` as an object of JSON: enums by value, paths as text."""
    plain: dict[str, object] = {}
    for field in dataclasses.fields(result):
        value, how = getattr(result, field.name), field.metadata
        if "internal" in how:
            continue
        if "prefix" in how:
            inner = {} if value is None else _plain(value)
            assert isinstance(inner, Mapping)
            plain |= {f"{how['prefix']}{key}": figure for key, figure in inner.items()}
        elif value is not None or "if_any" not in how:
            plain[str(how.get("key", field.name)).format_map(vars(result))] = _plain(value)
    return plain


def _plain(value: object) -> object:
    if isinstance(value, Figures):
        return to_json(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def ratios(numerators: Iterable[float], denominators: Iterable[float], scale: float = 1.0) -> list[float]:
    """``scale * a / b`` of the two measurements of each round."""
    return [scale * a / b for a, b in zip(numerators, denominators, strict=True)]
