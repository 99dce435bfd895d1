"""Configuration: nested frozen dataclasses, read from a TOML file and dotted names.

A component's configuration is a frozen dataclass; a run's configuration is a dataclass of those, each a
TOML table. The same names serve the file and the command line: ``[model] d_model = 256`` in the file is
``model.d_model=256`` as an override, and the override wins.

A field is one of ``int``, ``float``, ``bool``, ``str``, ``Path``, an ``Enum`` (by value), a nested
dataclass, ``T | None``, ``tuple[T, ...]``, ``Mapping[str, float | str]``: an open table, whose keys the
component checks, or ``Mapping[str, X]`` of a dataclass X: tables of one kind, whose names the user
chooses (``[tasks.code]``, and ``tasks.code.weight=2`` as an override).
Metadata: ``help`` is the text that ``dotted_fields`` shows; ``read_as`` is the dataclass of a field whose
annotation is wider; ``words`` names values of an ``int``, which are then read and written by these names
alone; ``size`` marks bytes: an ``int`` then also takes ``"512MiB"``; a ``str`` is checked and stays text, so
that a fraction such as ``"25%"`` can be resolved once the whole is known. ``option`` declares fields of the command line.

TOML has no null, so the word ``none`` stands for one: in a field that may be None, ``"none"`` is None.

A user's mistake raises ConfigError with one line that names the file, the dotted key, what was expected. A
declaration that this module cannot read raises TypeError. ``docs/DESIGN.md`` says which libraries
were tried in its place.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from tierstore.errors import ConfigError
from tierstore.units import parse_size

__all__ = ["FieldInfo", "as_dict", "dotted_fields", "dump", "from_dict", "load"]

T = TypeVar("T")

_NONE = "none"
_BOOLS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
_TABLE_NAME = re.compile(r"[A-Za-z0-9_-]+")
_ANY_WHOLE = 2**62  # a whole for checking a fraction's syntax, before the real one is known


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """A field's dotted name, type in words, and default (None when ``required``)."""

    name: str
    type: str
    default: object
    required: bool
    help: str
    #: The type of the scalar or element; the nested dataclass (of each table, if ``named``); or dict for an open table.
    kind: Any
    optional: bool
    repeated: bool
    length: int | None  # of a tuple with a fixed number of elements
    size: bool
    #: Names of values of an integer.
    words: Mapping[str, int]
    metadata: Mapping[str, Any]
    #: Whether it holds tables whose names the user chooses.
    named: bool = False

    @property
    def nested(self) -> bool:
        """Whether the field is a nested dataclass."""
        return dataclasses.is_dataclass(self.kind) and not self.named

    @property
    def open(self) -> bool:
        """Whether the field is a table whose keys the component checks."""
        return self.kind is dict

    def in_words(self, value: object) -> object:
        """The name of ``value`` if it has one, else ``value`` itself."""
        return next((word for word, number in self.words.items() if number == value), value)


class PathKind(Enum):
    """What an option's path must be."""

    FILE = "file"  # it need not exist
    EXISTING_FILE = "existing file"
    EXISTING_DIRECTORY = "existing directory"


def key(default: T, help: str, **how: Any) -> T:
    """A dataclass field that is a key of a configuration, with its default and help. ``how``: the rest of its metadata."""
    return dataclasses.field(default=default, metadata={"help": help, **how})


def option(default: Any = dataclasses.MISSING, help: str = "", *names: str, **how: Any) -> Any:
    """A dataclass field that is an option of a command, with its default and help (``tierstore.cli.options``).

    ``names``: the option's names (default: from the field's, ``--host-budget`` for ``host_budget``). ``how``: ``size``
    (bytes, typed as 512MiB), ``least`` and ``most`` (of an integer), ``choices`` (texts, or members of an enum), ``path`` (a
    ``PathKind``, or the ``OutputKind`` of a file to write), ``argument`` (positional), ``typed`` (the default as text),
    ``shown`` (False: ``--help`` shows no default, and the field's is used if the option is not given), ``key`` (the option
    sets this key of a benchmark's configuration), ``click`` (further arguments of ``click.option``).
    """
    return key(default, help, names=names, **how)


def load(cls: type[T], path: Path | None, overrides: Mapping[str, object] | None = None) -> T:
    """A ``cls`` from the TOML file at ``path`` (None: defaults) and ``overrides`` by dotted name.

    An override that is text is converted to its field's type (a tuple's elements are separated by commas, or written
    in brackets as in TOML); any other value is used as it is. An override of None is skipped.
    Raises ConfigError for anything that does not fit, OSError for a file that cannot be read.
    """
    table, origin = ({}, "") if path is None else (_parsed(path), f"{path}: ")
    values = dict(_read(cls, table, origin=origin))
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    leaves = {info.name: info for info in _leaves(cls)} if given else {}
    for name, value in given.items():
        _override(leaves, values, name, value)
    if given and path is not None:
        # If the file alone is valid, an override causes the error: then the file is not named.
        with contextlib.suppress(ConfigError):
            from_dict(cls, table)
            origin = ""
    return _build(cls, values, None, origin=origin)


def from_dict(cls: type[T], table: Mapping[str, object], *, origin: str = "") -> T:
    """The inverse of ``as_dict``. ``origin``: the file that errors name. Raises ConfigError."""
    where = f"{origin}: " if origin else ""
    return _build(cls, dict(_read(cls, table, origin=where)), None, origin=where)


def as_dict(config: object) -> dict[str, object]:
    """``config`` in the types of JSON. Paths and enums become text, tuples lists, tables dicts."""
    return {info.name: _plain(info.in_words(getattr(config, info.name))) for info in _fields(type(config))}


def dump(config: object) -> str:
    """TOML text that loads back as a value equal to ``config``.

    Raises ConfigError for what TOML text cannot hold (a number that is not finite, text that is not UTF-8).
    """
    import tomli_w  # here, because no command writes a configuration

    text = tomli_w.dumps({key: _writable(value, key) for key, value in as_dict(config).items()})
    if from_dict(type(config), tomllib.loads(text)) != config:
        raise ConfigError(f"the word {_NONE!r} means None and cannot be a value itself")
    return text


def dotted_fields(cls: type[object]) -> list[FieldInfo]:
    """Every field of ``cls`` and its nested tables, in order of declaration. Omits those in its ``training_only``; tables
    that the user names appear once, under NAME.
    """
    found: list[FieldInfo] = []
    idle = tuple(f"{key}." for key in getattr(cls, "training_only", ()))
    for info in _leaves(cls):
        if f"{info.name}.".startswith(idle):
            continue
        found += _leaves(info.kind, None, f"{info.name}.NAME.") if info.named else [info]
    return found


# Checks of a component's __post_init__ ----------------------------------------------------------------------


def check_least(config: object, least: float, *names: str, table: str = "") -> None:
    """Raises ConfigError naming the field, of ``table`` (``--``: an option of a command), unless all fields ``names`` are
    finite and at least ``least``, or None.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{_named(table, name)}: expected at least {least}, got {value}")


def check_positive(config: object, *names: str, table: str = "") -> None:
    """The same for numbers that must be more than 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{_named(table, name)}: expected more than 0, got {value}")


def _named(table: str, name: str) -> str:
    return f"--{name.replace('_', '-')}" if table == "--" else f"{table}{name}"


def choose_member(config: object, name: str, kind: type[Enum]) -> None:
    """Makes the field ``name`` of the frozen ``config`` the member of ``kind`` with its value. Raises ConfigError."""
    value = getattr(config, name)
    try:
        object.__setattr__(config, name, kind(value))
    except ValueError as exc:
        choices = ", ".join(str(member.value) for member in kind)
        raise ConfigError(f"{name}: expected one of {choices}, got {value!r}") from exc


# Declarations -----------------------------------------------------------------------------------------------


def _leaves(cls: type[object], base: object = None, prefix: str = "") -> Iterator[FieldInfo]:
    for info in _fields(cls, base, prefix):
        yield from _leaves(info.kind, info.default, f"{info.name}.") if info.nested else (info,)


def _fields(cls: type[object], base: object = None, prefix: str = "") -> Iterator[FieldInfo]:
    """The fields of ``cls``; defaults come from the instance ``base``, if given."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    for info in _declared(cls, prefix):
        default = info.default if base is None else getattr(base, info.name.removeprefix(prefix))
        own = base is None or (default is info.default and not info.required)
        yield info if own else dataclasses.replace(info, default=default, required=False)


@functools.cache
def _declared(cls: type[Any], prefix: str) -> list[FieldInfo]:
    """The fields of ``cls``, a dataclass, with the defaults that it declares."""
    hints = typing.get_type_hints(cls)
    infos = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        try:
            hint = field.metadata.get("read_as", hints[field.name])
            infos.append(_info(field, hint, default, prefix))
        except TypeError as exc:
            raise TypeError(
                f"{cls.__name__}.{field.name}: a configuration cannot hold {field.type!r}"
            ) from exc
    return infos


def _info(field: dataclasses.Field[object], hint: Any, default: object, prefix: str) -> FieldInfo:
    """Parse the annotation ``hint``. Raises TypeError for one that a configuration cannot hold."""
    members, optional = [hint], False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        optional = len(members) < len(typing.get_args(hint))
    repeated, length = typing.get_origin(members[0]) is tuple, None
    if repeated:
        *members, last = typing.get_args(members[0])
        if last is not Ellipsis:
            length = len(members) + 1
            members = [*members, last]
    kind = dict if members[0] == Mapping[str, float | str] else members[0]
    named = typing.get_origin(kind) is collections.abc.Mapping
    if named:
        key, kind = typing.get_args(kind)
        if key is not str or not dataclasses.is_dataclass(kind):
            raise TypeError
    size, words = bool(field.metadata.get("size", False)), field.metadata.get("words", {})
    table = kind is dict or dataclasses.is_dataclass(kind)
    enum = isinstance(kind, type) and issubclass(kind, Enum)
    if (
        any(member is not members[0] for member in members)
        or not (table or enum or kind in _WORDS)
        or (table and (optional or repeated))
        or (size and kind not in (int, str))
        or (words and (size or kind is not int))
    ):
        raise TypeError
    required = default is dataclasses.MISSING
    return FieldInfo(
        name=prefix + field.name,
        type="named tables"
        if named
        else _in_words(kind, words, size=size, repeated=repeated, length=length)
        + (", or none" if optional else ""),
        default=None if required else default,
        required=required,
        help=str(field.metadata.get("help", "")),
        kind=kind,
        optional=optional,
        repeated=repeated,
        length=length,
        size=size,
        words=words,
        metadata=field.metadata,
        named=named,
    )


def _in_words(kind: Any, words: Iterable[str], *, size: bool, repeated: bool, length: int | None) -> str:
    if kind is dict or dataclasses.is_dataclass(kind):
        return "a table of numbers and text" if kind is dict else "a table"
    if size:
        word = "a size such as 512MiB, 4GB" + (" or 25%" if kind is str else "")
    elif issubclass(kind, Enum):
        word = "one of " + ", ".join(str(member.value) for member in kind)
    else:
        word = " or ".join([*words, _WORDS[kind]])
    return f"a list{f' of {length}' if length else ''}, each {word}" if repeated else word


# Reading ----------------------------------------------------------------------------------------------------
# Values travel by dotted name until _build makes the dataclasses, so that each __post_init__ sees the file and
# the overrides together.


def _parsed(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not valid TOML: not UTF-8 text at byte {exc.start}") from exc


def _read(
    cls: type[object], table: Mapping[str, object], *, prefix: str = "", origin: str
) -> Iterator[tuple[str, object]]:
    """Yield the values of ``table`` by dotted name, each converted to the type of its field."""
    infos = {info.name: info for info in _fields(cls, prefix=prefix)}
    for key, value in table.items():
        name = prefix + key
        info = infos.get(name)
        if info is None:
            raise ConfigError(f"{origin}{_unknown(name, list(infos))}")
        if not (info.nested or info.named):
            yield name, _converted(info, value, origin=origin)
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{origin}{name}: expected a table, got {_shown(value)}")
        elif info.nested:
            yield from _read(info.kind, value, prefix=f"{name}.", origin=origin)
        else:
            for item, inner in value.items():
                yield _table_name(info, item, origin=origin), None
                if not isinstance(inner, Mapping):
                    raise ConfigError(f"{origin}{name}.{item}: expected a table, got {_shown(inner)}")
                yield from _read(info.kind, inner, prefix=f"{name}.{item}.", origin=origin)


def _table_name(info: FieldInfo, item: str, *, origin: str = "") -> str:
    """The dotted name of the table ``item`` of ``info``; as a key among the values it records that the table exists."""
    if not _TABLE_NAME.fullmatch(item):
        raise ConfigError(f"{origin}{info.name}: expected names of letters, digits, - and _, got {item!r}")
    return f"{info.name}.{item}"


def _override(leaves: Mapping[str, FieldInfo], values: dict[str, object], name: str, value: object) -> None:
    """Set ``name``, one of ``leaves``, in ``values``; text is converted to the type of its field."""
    for info in leaves.values():
        if not (info.open or info.named) or not name.startswith(f"{info.name}."):
            continue
        item = name.removeprefix(f"{info.name}.")
        if info.open:
            items = _converted(info, {item: _number(value)})
            values[info.name] = {**values.get(info.name, {}), **items}  # type: ignore[dict-item]
            return
        table = _table_name(info, item.partition(".")[0])
        leaves = {leaf.name: leaf for leaf in _leaves(info.kind, None, f"{table}.")}
        values[table] = None
        break
    if name in leaves:
        info = leaves[name]
        if isinstance(value, str) and info.kind is not str:
            value = value.strip()
        values[name] = _converted(info, _listed(info, value) if info.repeated else value, typed=True)
        return
    inside = [known for known in leaves if known.startswith(f"{name}.")]
    if inside:
        raise ConfigError(f"{name}: a table has no value of its own; set one of {', '.join(inside)}")
    raise ConfigError(_unknown(name, list(leaves)))


def _listed(info: FieldInfo, value: object) -> object:
    """Parse a list from the command line: separated by commas, or in brackets as in TOML."""
    if not isinstance(value, str) or (info.optional and value == _NONE):
        return value
    if not value.startswith("["):
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return tomllib.loads(f"list = {value}")["list"]
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(
            f"{info.name}: expected {info.type}, separated by commas, got {_shown(value)}"
        ) from exc


def _number(value: object) -> object:
    """Parse an item of an open table from the command line: a number if it reads as one."""
    if isinstance(value, str):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def _converted(info: FieldInfo, value: Any, *, origin: str = "", typed: bool = False) -> Any:
    """Convert ``value`` to the type of ``info``. ``typed``: text comes from the command line. Raises ConfigError."""
    if info.open:
        return _table(info, value, origin)
    if info.optional and (value is None or value == _NONE):
        return None
    try:
        if not info.repeated:
            return _scalar(info, value, typed=typed)
        if not isinstance(value, list | tuple) or info.length not in (None, len(value)):
            raise ValueError
        return tuple(_scalar(info, element, typed=typed) for element in value)
    except ConfigError as exc:  # parse_size names the field itself
        raise ConfigError(f"{origin}{exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{origin}{info.name}: expected {info.type}, got {_shown(value)}") from exc


def _table(info: FieldInfo, value: object, origin: str) -> dict[str, object]:
    """Check the items of an open table and return them unconverted. Raises ConfigError."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{origin}{info.name}: expected a table, got {_shown(value)}")
    for key, item in value.items():
        finite = not isinstance(item, float) or math.isfinite(item)
        if isinstance(item, bool) or not isinstance(item, int | float | str) or not finite:
            raise ConfigError(f"{origin}{info.name}.{key}: expected a number or text, got {_shown(item)}")
    return dict(value)


def _scalar(info: FieldInfo, value: Any, *, typed: bool) -> object:
    """Convert one value or raise ValueError. Values that TOML or Python typed are not converted, except int to float."""
    kind = info.kind
    if info.size:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        size = parse_size(value, whole=None if kind is int else _ANY_WHOLE, name=info.name)
        return size if kind is int else str(value)
    if isinstance(value, str) and value in info.words:
        return info.words[value]
    if issubclass(kind, Enum):
        for member in kind:
            same = type(member.value) is type(value) and member.value == value
            if member is value or same or (typed and str(member.value) == value):
                return member
    elif typed and isinstance(value, str) and kind in (int, float, bool):
        value = _BOOLS.get(value.lower()) if kind is bool else kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    if value in info.words.values():  # a value with a name must be given by that name
        raise ValueError
    finite = not isinstance(value, float) or math.isfinite(value)
    if isinstance(value, kind) and finite and (kind is bool or not isinstance(value, bool)):
        return value
    raise ValueError


def _build(cls: type[T], values: Mapping[str, object], base: T | None, *, prefix: str = "", origin: str) -> T:
    """Build a ``cls`` from ``values``; missing ones come from ``base``, or from the declared defaults."""
    given: dict[str, Any] = {}
    for info in _fields(cls, base, prefix):
        key = info.name.removeprefix(prefix)
        if info.nested:
            given[key] = _build(info.kind, values, info.default, prefix=f"{info.name}.", origin=origin)
        elif info.named:
            inside = [
                name.removeprefix(f"{info.name}.") for name in values if name.startswith(f"{info.name}.")
            ]
            names = dict.fromkeys(item.partition(".")[0] for item in inside)
            given[key] = (
                info.default
                if not names
                else {
                    name: _build(info.kind, values, None, prefix=f"{info.name}.{name}.", origin=origin)
                    for name in names
                }
            )
        elif info.name in values:
            given[key] = values[info.name]
        elif info.required:
            raise ConfigError(f"{origin}{info.name}: not set; expected {info.type}")
        else:
            given[key] = info.default
    try:
        return cls(**given)
    except ValueError as exc:  # a ConfigError, or any other error of a dataclass's check
        # A message that starts with its option or dotted key does not need the table's name.
        where = f"[{prefix[:-1]}] " if prefix and not str(exc).startswith((prefix, "--")) else ""
        raise ConfigError(f"{origin}{where}{exc}") from exc


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"{name}: unknown configuration key; did you mean {' or '.join(near)}?"
    shown = known if len(known) <= 12 else dict.fromkeys(key.split(".")[0] for key in known)
    return f"{name}: unknown configuration key; known here: {', '.join(shown)}"


def _shown(value: object) -> str:
    text = "a table" if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Writing ----------------------------------------------------------------------------------------------------


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return as_dict(value)
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _writable(value: object, name: str) -> object:
    """``value`` in the types of TOML, with the word ``none`` for None."""
    if isinstance(value, dict):
        return {key: _writable(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_writable(item, name) for item in value]
    try:
        str(value).encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{name}: {value!r} cannot be encoded as UTF-8") from exc
    return _NONE if value is None else value
