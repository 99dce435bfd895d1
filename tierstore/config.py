"""Configuration: nested frozen dataclasses, read from one TOML file and from dotted names.

A component's configuration is a frozen dataclass; a run's configuration is a dataclass of those, each a
TOML table. The same names serve the file and the command line: ``[model] d_model = 256`` in the file is
``model.d_model=256`` as an override, and the override wins.

A field is one of ``int``, ``float``, ``bool``, ``str``, ``Path``, an ``Enum`` (by value), a nested
dataclass, ``T | None``, ``tuple[T, ...]``, or ``Mapping[str, float | str]``: an open table, whose keys the
component checks. Metadata: ``help`` is what ``dotted_fields`` shows, and
``size`` marks bytes: an ``int`` then also takes ``"512MiB"``; a ``str`` stays the text, checked, so that
a fraction such as ``"25%"`` can be resolved once the whole is known.

TOML has no null, so the word ``none`` stands for one: in a field that may be None, ``"none"`` is None.

Everything that a user can get wrong raises ConfigError with one line: the file, the dotted key, what was
expected. A declaration that this module cannot read is a TypeError: that is ours to mend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from tierstore.errors import ConfigError
from tierstore.units import parse_size

__all__ = ["FieldInfo", "as_dict", "dotted_fields", "dump", "from_dict", "load"]

T = TypeVar("T")

_NONE = "none"
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_ANY_WHOLE = 2**62  # a whole to check a fraction's syntax against, before the real one is known


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """One settable value: its dotted name, its type in words, and its default (None when ``required``)."""

    name: str
    type: str
    default: object
    required: bool
    help: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Spec:
    """A field's declaration, with its annotation taken apart once."""

    name: str
    kind: type  # the scalar's or element's type, the nested dataclass, or dict for an open table
    optional: bool
    repeated: bool
    length: int | None  # of a tuple with a fixed number of elements
    size: bool
    default: object  # dataclasses.MISSING when there is none
    help: str

    @property
    def nested(self) -> bool:
        return dataclasses.is_dataclass(self.kind)

    @property
    def open(self) -> bool:
        return self.kind is dict

    @property
    def expected(self) -> str:
        """The type in words, as errors and listings name it."""
        if self.open:
            return "a table of numbers and text"
        if self.size:
            word = "a size such as 512MiB, 4GB" + (" or 25%" if self.kind is str else "")
        elif issubclass(self.kind, Enum):
            word = "one of " + ", ".join(str(member.value) for member in self.kind)
        else:
            word = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}[
                self.kind
            ]
        if self.repeated:
            word = f"a list{f' of {self.length}' if self.length else ''}, each {word}"
        return f"{word}, or none" if self.optional else word


def load(cls: type[T], path: Path | None, overrides: Mapping[str, object] | None = None) -> T:
    """A ``cls`` from the TOML file at ``path`` (None: its defaults), then ``overrides`` by dotted name.

    An override that is text is converted to its field's type (a tuple's elements are separated by
    commas, or stand in brackets as in TOML); any other value is taken as it is. An override of None means
    "not given" and is skipped.
    Raises ConfigError for anything that does not fit, OSError for a file that cannot be read.
    """
    table: dict[str, object] = {}
    origin = ""
    if path is not None:
        origin = f"{path}: "
        try:
            table = tomllib.loads(path.read_bytes().decode())
        except tomllib.TOMLDecodeError as exc:
            raise ConfigError(f"{origin}not valid TOML: {exc}") from exc
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{origin}not valid TOML: not UTF-8 text at byte {exc.start}") from exc
    values = _read_table(cls, table, prefix="", origin=origin)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    for name, value in given.items():
        _override(cls, values, name, value)
    if given and path is not None:
        # What the file alone cannot be refused for is no fault of the file's: then its name misleads.
        with contextlib.suppress(ConfigError):
            _build(cls, _read_table(cls, table, prefix="", origin=""), None, prefix="", origin="")
            origin = ""
    return _build(cls, values, None, prefix="", origin=origin)


def from_dict(cls: type[T], table: Mapping[str, object], *, origin: str = "") -> T:
    """The inverse of ``as_dict``. ``origin`` (a file) is what errors name. Raises ConfigError."""
    where = f"{origin}: " if origin else ""
    return _build(cls, _read_table(cls, table, prefix="", origin=where), None, prefix="", origin=where)


def as_dict(config: object) -> dict[str, object]:
    """``config`` as JSON can hold it: paths and enums as text, tuples as lists, tables as dicts."""
    return {
        spec.name: as_dict(value) if spec.nested else _plain(value)
        for spec, value in ((spec, getattr(config, spec.name)) for spec in _specs(type(config)))
    }


def dump(config: object) -> str:
    """TOML text that loads back to a value equal to ``config``.

    Raises ConfigError for what TOML text cannot hold (a number that is not finite, the word ``none`` where
    that means None).
    """
    return "\n".join(_dump_table(config, prefix="")).lstrip("\n") + "\n"


def dotted_fields(cls: type[object]) -> list[FieldInfo]:
    """Every value that ``cls`` and its tables hold, in order of declaration."""
    return list(_walk(cls, None, prefix=""))


# Declarations -----------------------------------------------------------------------------------------------


def _specs(cls: type[object]) -> list[_Spec]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    hints = typing.get_type_hints(cls)
    return [_spec(cls, field, hints[field.name]) for field in dataclasses.fields(cls) if field.init]


def _spec(cls: type[object], field: dataclasses.Field[object], annotation: object) -> _Spec:
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        optional = len(members) < len(typing.get_args(annotation))
        annotation = members[0] if optional and len(members) == 1 else None
    repeated, length = typing.get_origin(annotation) is tuple, None
    if repeated:
        first, *rest = typing.get_args(annotation)
        if rest != [Ellipsis]:
            length = 1 + len(rest)
        alike = rest == [Ellipsis] or all(other is first for other in rest)
        annotation = first if alike else None
    if annotation == Mapping[str, float | str]:
        annotation = dict
    scalar = isinstance(annotation, type) and (
        annotation in (int, float, bool, str, Path) or issubclass(annotation, Enum)
    )
    size = bool(field.metadata.get("size", False))
    table = dataclasses.is_dataclass(annotation) and not optional and not repeated
    table = table or annotation is dict
    if not isinstance(annotation, type) or not (scalar or table) or (size and annotation not in (int, str)):
        raise TypeError(f"{cls.__name__}.{field.name}: a configuration cannot hold {field.type!r}")
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    help_text = str(field.metadata.get("help", ""))
    return _Spec(
        name=field.name,
        kind=annotation,
        optional=optional,
        repeated=repeated,
        length=length,
        size=size,
        default=default,
        help=help_text,
    )


def _walk(cls: type[object], base: object, *, prefix: str) -> Iterator[FieldInfo]:
    for spec in _specs(cls):
        default = spec.default if base is None else getattr(base, spec.name)
        name = prefix + spec.name
        missing = default is dataclasses.MISSING
        if spec.nested:
            yield from _walk(spec.kind, None if missing else default, prefix=f"{name}.")
        else:
            shown = None if missing else default
            yield FieldInfo(name=name, type=spec.expected, default=shown, required=missing, help=spec.help)


# Reading ----------------------------------------------------------------------------------------------------
# Values that were given travel as nested dicts of converted values until _build makes the dataclasses, so
# that each __post_init__ sees the file and the overrides together.


def _read_table(
    cls: type[object], table: Mapping[str, object], *, prefix: str, origin: str
) -> dict[str, object]:
    specs = {spec.name: spec for spec in _specs(cls)}
    values: dict[str, object] = {}
    for key, value in table.items():
        name = prefix + key
        if key not in specs:
            raise ConfigError(f"{origin}{_unknown(name, [prefix + known for known in specs], cls)}")
        spec = specs[key]
        if spec.nested:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{origin}{name}: expected a table, got {_shown(value)}")
            values[key] = _read_table(spec.kind, value, prefix=f"{name}.", origin=origin)
        elif spec.open:
            values[key] = _read_open(value, name=name, origin=origin)
        else:
            values[key] = _convert(spec, value, name=name, origin=origin, scalar=_from_value)
    return values


def _read_open(value: object, *, name: str, origin: str) -> dict[str, object]:
    """The items of an open table, as they were typed."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{origin}{name}: expected a table, got {_shown(value)}")
    for key, item in value.items():
        finite = not isinstance(item, float) or math.isfinite(item)
        if isinstance(item, bool) or not isinstance(item, int | float | str) or not finite:
            raise ConfigError(f"{origin}{name}.{key}: expected a number or text, got {_shown(item)}")
    return dict(value)


def _open_item(value: object) -> object:
    """An item of an open table that was typed on a command line: a number if it reads as one."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _override(cls: type[object], values: dict[str, object], name: str, value: object) -> None:
    known = [info.name for info in dotted_fields(cls)]
    *tables, key = name.split(".")
    for depth, table in enumerate(tables):
        spec = next((spec for spec in _specs(cls) if spec.name == table and (spec.nested or spec.open)), None)
        if spec is None:
            raise ConfigError(_unknown(name, known, cls))
        inner = values.setdefault(table, {})
        assert isinstance(inner, dict)
        if spec.open:
            item = ".".join([*tables[depth + 1 :], key])
            inner.update(_read_open({item: _open_item(value)}, name=name.removesuffix(f".{item}"), origin=""))
            return
        cls = spec.kind
        values = inner
    spec = next((spec for spec in _specs(cls) if spec.name == key), None)
    if spec is None:
        raise ConfigError(_unknown(name, known, cls))
    if spec.open:
        values[key] = _read_open(value, name=name, origin="")
        return
    if spec.nested:
        inside = [candidate for candidate in known if candidate.startswith(f"{name}.")]
        raise ConfigError(f"{name}: a table has no value of its own; set one of {', '.join(inside)}")
    if isinstance(value, str):
        scalar = _from_text
        if spec.repeated and value.startswith("["):
            value, scalar = _bracketed(spec, value, name), _from_value
        elif spec.repeated and not (spec.optional and value == _NONE):
            value = [part.strip() for part in value.split(",") if part.strip()]
        values[key] = _convert(spec, value, name=name, origin="", scalar=scalar)
    else:
        values[key] = _convert(spec, value, name=name, origin="", scalar=_from_value)


def _bracketed(spec: _Spec, text: str, name: str) -> object:
    """A list that was typed on a command line as a file would have it."""
    try:
        return tomllib.loads(f"list = {text}")["list"]
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(
            f"{name}: expected {spec.expected}, separated by commas, got {_shown(text)}"
        ) from exc


def _convert(
    spec: _Spec, value: object, *, name: str, origin: str, scalar: Callable[[_Spec, object, str], object]
) -> object:
    """``value`` as ``spec`` declares it. ``scalar`` converts one element, or raises ValueError."""
    if spec.optional and (value is None or value == _NONE):
        return None
    try:
        if not spec.repeated:
            return scalar(spec, value, name)
        if not isinstance(value, list | tuple) or spec.length not in (None, len(value)):
            raise ValueError
        return tuple(scalar(spec, element, name) for element in value)
    except ConfigError as exc:  # from parse_size, whole already
        raise ConfigError(f"{origin}{exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{origin}{name}: expected {spec.expected}, got {_shown(value)}") from exc


def _from_value(spec: _Spec, value: object, name: str) -> object:
    """One value as TOML or Python typed it: nothing is guessed, but an integer is also a number."""
    kind = spec.kind
    if spec.size:
        return _size(spec, value, name)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
        return value
    if issubclass(kind, Enum):
        for member in kind:
            if member.value == value and type(member.value) is type(value):
                return member
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise ValueError


def _from_text(spec: _Spec, value: object, name: str) -> object:
    """One value that was typed on a command line."""
    kind = spec.kind
    if not isinstance(value, str):
        return _from_value(spec, value, name)
    if spec.size:
        return _size(spec, value, name)
    if issubclass(kind, Enum):
        for member in kind:
            if str(member.value) == value:
                return member
        raise ValueError
    if kind is bool:
        if value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        raise ValueError
    if kind is int:
        return int(value, 10)
    return _from_value(spec, float(value) if kind is float else value, name)


def _size(spec: _Spec, value: object, name: str) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    if spec.kind is int:
        return parse_size(value, name=name)
    parse_size(value, whole=_ANY_WHOLE, name=name)
    return str(value)


def _build(cls: type[T], values: Mapping[str, object], base: object, *, prefix: str, origin: str) -> T:
    """A ``cls`` of ``values``; what they leave out comes from ``base``, or from the declared defaults."""
    arguments: dict[str, object] = {}
    for spec in _specs(cls):
        default = spec.default if base is None else getattr(base, spec.name)
        missing = default is dataclasses.MISSING
        name = prefix + spec.name
        if spec.nested:
            inner = values.get(spec.name, {})
            assert isinstance(inner, Mapping)
            arguments[spec.name] = _build(
                spec.kind, inner, None if missing else default, prefix=f"{name}.", origin=origin
            )
        elif spec.name in values:
            arguments[spec.name] = values[spec.name]
        elif missing:
            raise ConfigError(f"{origin}{name}: not set; expected {spec.expected}")
        else:
            arguments[spec.name] = default
    try:
        return cls(**arguments)
    except ValueError as exc:  # a ConfigError, or a dataclass that checks itself the plain way
        where = f"[{prefix[:-1]}] " if prefix and not str(exc).startswith(prefix) else ""
        raise ConfigError(f"{origin}{where}{exc}") from exc


def _unknown(name: str, known: list[str], cls: type[object]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"{name}: unknown configuration key; did you mean {' or '.join(near)}?"
    known = known if len(known) <= 12 else [spec.name for spec in _specs(cls)]
    return f"{name}: unknown configuration key; known here: {', '.join(known)}"


def _shown(value: object) -> str:
    text = "a table" if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Writing ----------------------------------------------------------------------------------------------------


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _dump_table(config: object, *, prefix: str) -> list[str]:
    lines: list[str] = []
    tables: list[str] = []
    for spec in _specs(type(config)):
        value = getattr(config, spec.name)
        name = prefix + spec.name
        if spec.nested:
            inner = _dump_table(value, prefix=f"{name}.")
            tables += ["", f"[{name}]", *inner] if inner else []
        elif spec.open:
            items = [
                f"{_toml_key(key)} = {_toml_scalar(spec, item, f'{name}.{key}')}"
                for key, item in value.items()
            ]
            tables += ["", f"[{name}]", *items] if items else []
        else:
            lines.append(f"{spec.name} = {_toml(spec, value, name)}")
    return lines + tables


def _toml(spec: _Spec, value: object, name: str) -> str:
    if value is None:
        return f'"{_NONE}"'
    if spec.optional and value == _NONE:
        raise ConfigError(f"{name}: the word {_NONE!r} stands for no value, and cannot be one")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_scalar(spec, element, name) for element in value) + "]"
    return _toml_scalar(spec, value, name)


def _toml_scalar(spec: _Spec, value: object, name: str) -> str:
    plain = _plain(value)
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, int):
        if spec.size and plain and plain % 2**20 == 0:
            return f'"{plain // 2**20}MiB"'
        return str(plain)
    if isinstance(plain, float):
        if not math.isfinite(plain):
            raise ConfigError(f"{name}: expected a finite number, got {plain}")
        return repr(plain)
    if isinstance(plain, str):
        try:
            plain.encode()
        except UnicodeEncodeError as exc:
            raise ConfigError(f"{name}: {plain!r} is not text that UTF-8 can hold") from exc
        return _toml_string(plain)
    raise TypeError(f"{name}: a configuration cannot hold {plain!r}")


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "_").isidentifier()
    return key if bare else _toml_string(key)


def _toml_string(text: str) -> str:
    """A TOML basic string: control characters, which TOML forbids as they are, become escapes."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return (
        '"'
        + "".join(
            escapes.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char)
            for char in text
        )
        + '"'
    )
