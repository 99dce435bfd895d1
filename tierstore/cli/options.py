"""Command options: those derived from dataclass fields, and the few that commands share.

Two decorators derive options. ``config_options`` makes options for chosen configuration keys, which a TOML file and
``--set`` can also give. ``dataclass_options`` makes one for each field of a dataclass and passes the command an instance::

    @dataclass(frozen=True, kw_only=True)
    class Listening:
        host: str = tierstore.config.option("127.0.0.1", "Address to listen on.")

    @click.command()
    @config_options(ServeConfig, {"--batch-size": "batch.sequences"})
    @dataclass_options(Listening, "listening")
    def serve(given: dict[str, object], listening: Listening) -> None: ...

Type, default and help text come from the field (see ``tierstore.config`` for the types).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tierstore.cli.output import Output, OutputMode
from tierstore.config import FieldInfo, PathKind, dotted_fields
from tierstore.errors import ConfigError
from tierstore.outputs import OutputKind, check_output, refuse_same
from tierstore.units import format_bytes, is_unicode, parse_size

F = TypeVar("F", bound=Callable[..., Any])

_ANY_WHOLE = 2**62


# Older releases of click do not accept type arguments at run time.
if TYPE_CHECKING:
    from tierstore.train.config import TrainConfig

    _AnyType = click.ParamType[Any]
    _ChoiceType = click.Choice[str]
    _PathType = click.Path[Path]
else:
    _AnyType, _ChoiceType, _PathType = click.ParamType, click.Choice, click.Path


class _Parsed(_AnyType):
    """A type whose ``parse`` takes the value and the option's name, and raises ConfigError for a value that does not fit."""

    def __init__(self, name: str, parse: Callable[[Any, str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> object:
        try:
            return self._parse(value, _name(param))
        except ConfigError as exc:
            raise click.UsageError(str(exc), ctx) from exc


def _size(value: object, name: str) -> int:
    return parse_size(value if isinstance(value, int) else str(value), name=name)


def _fraction(value: object, name: str) -> str:
    parse_size(str(value), whole=_ANY_WHOLE, name=name)
    return str(value)


def _text(value: object, name: str) -> str:
    if not is_unicode(value):  # Python decodes other bytes to lone surrogates
        raise ConfigError(f"{name}: expected text in UTF-8, got {value!r}")
    return str(value)


def _numbers(value: object, name: str) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return value
    try:
        return tuple(int(part) for part in str(value).split(","))
    except ValueError as exc:
        raise ConfigError(f"{name}: expected comma-separated integers, got {value!r}") from exc


class MemberOf(_ChoiceType):
    """One of ``members`` of an enum, typed as its value."""

    def __init__(self, members: Iterable[Enum]) -> None:
        self._members = {str(member.value): member for member in members}
        super().__init__(list(self._members))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, Enum):
            return value
        return self._members[super().convert(value, param, ctx)]


def _name(param: click.Parameter | None) -> str:
    """The option's name for error messages, such as ``--host-budget``."""
    if param is None:
        return "size"
    return next((option for option in param.opts if option.startswith("-")), param.human_readable_name)


class _Path(_PathType):
    """A path to read or, with ``output``, a file to write. An output is refused if it may not replace the existing file, or
    if it is another path of the same command.
    """

    def __init__(self, output: OutputKind | None = None, **checks: bool) -> None:
        super().__init__(path_type=Path, **checks)
        self.output = output

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path: Path = super().convert(value, param, ctx)
        if ctx is None or ctx.resilient_parsing:
            return path
        # Every path of the command, and whether it is an output.
        known: list[tuple[Path, bool]] = ctx.meta.setdefault("tierstore.paths", [])
        try:
            target = path if self.output is None else check_output(path, self.output)
            others = [other for other, output in known if output or self.output is not None]
            if target.is_file() or not target.exists():
                refuse_same(target, others)
        except ConfigError as exc:
            raise click.UsageError(f"{_name(param)}: {exc}", ctx) from exc
        known.append((target, self.output is not None))
        return path


def output_file(kind: OutputKind) -> _Path:
    """The type of a file that the command writes."""
    return _Path(kind, dir_okay=False)


#: An absolute size, such as ``512MiB``, ``4GB`` or ``1000``; converted to an int, in bytes.
SIZE = _Parsed("size", _size)
#: A size or a fraction, such as ``25%`` or ``0.25``; kept as text: ``parse_size(text, whole=...)`` converts it to bytes once
#: the whole is known.
FRACTION = _Parsed("size|fraction", _fraction)
#: Text that is valid UTF-8.
TEXT = _Parsed("text", _text)
#: Comma-separated integers, such as ``0,8,16``.
NUMBERS = _Parsed("text", _numbers)
PATH = _Path()
FILE = _Path(dir_okay=False)
EXISTING_FILE = _Path(exists=True, dir_okay=False)
EXISTING_DIRECTORY = _Path(exists=True, file_okay=False)


def options(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """Combine several options into one decorator; the help shows them in this order."""
    return lambda command: functools.reduce(
        lambda inner, option: option(inner), reversed(decorators), command
    )


# Options from fields ----------------------------------------------------------------------------------------


class Defaults(Enum):
    """The default of an option for a configuration key."""

    ELSEWHERE = "elsewhere"  # none: the file or the configuration supplies the value
    SHOWN = "shown"  # the field's default, shown in the help


def config_options(
    config: type[Any],
    table: Mapping[str, str | tuple[str, Mapping[str, Any]]],
    defaults: Defaults = Defaults.ELSEWHERE,
) -> Callable[[F], F]:
    """Options for keys of ``config``; the command gets the argument ``given``, a dict of values by dotted key.

    ``table``: for each option its dotted key, or a pair of the key and further arguments of ``click.option``. ``given``
    omits options that the user did not give.
    """
    infos = {info.name: info for info in dotted_fields(config)}
    declared, keys = [], {}
    for name, entry in table.items():
        key, settings = (entry, {}) if isinstance(entry, str) else entry
        argument = name.removeprefix("--").replace("-", "_")
        keys[argument] = key
        info = infos[key]
        listed = {"type": NUMBERS} if info.kind is int else {"multiple": True}
        given = {**(listed if info.repeated else {}), **settings}
        declared.append(_option(info, (name, argument), given, defaults))

    def collect(values: Mapping[str, Any]) -> dict[str, object]:
        return {keys[name]: value for name, value in values.items() if not _is_absent(value)}

    return _collected(declared, tuple(keys), "given", collect)


def dataclass_options(kind: type[Any], argument: str) -> Callable[[F], F]:
    """One option for each field of the dataclass ``kind``; the command gets an instance as ``argument``."""
    names = tuple(info.name for info in option_fields(kind))
    return _collected(field_options(kind), names, argument, lambda values: kind(**given_fields(kind, values)))


def option_fields(kind: type[Any]) -> list[FieldInfo]:
    """The fields of the dataclass ``kind`` that ``tierstore.config.option`` declares."""
    return [info for info in dotted_fields(kind) if "names" in info.metadata]


def field_options(kind: type[Any]) -> list[Callable[[Any], Any]]:
    """One option, or argument, for each of the ``option_fields`` of ``kind``."""
    found = []
    for info in option_fields(kind):
        how = info.metadata
        if how.get("argument"):
            count = -1 if info.repeated else 1
            found.append(click.argument(info.name, nargs=count, required=info.required, type=_type(info)))
            continue
        names = how["names"] or (f"--{info.name.replace('_', '-')}",)
        defaults = Defaults.SHOWN if how.get("shown", True) else Defaults.ELSEWHERE
        settings = {"multiple": info.repeated, **how.get("click", {})}
        if "typed" in how:
            settings["default"] = how["typed"]
        found.append(_option(info, (*names, info.name), settings, defaults))
    return found


def given_fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the ``values`` of the options of ``kind`` that the user gave, or that have a default in the help."""
    return {
        info.name: values[info.name] for info in option_fields(kind) if values[info.name] not in (None, ())
    }


def _option(
    info: FieldInfo, names: tuple[str, ...], settings: Mapping[str, Any], defaults: Defaults
) -> Callable[[F], F]:
    """The option for one field; ``settings`` are further arguments of ``click.option``."""
    said: dict[str, Any] = {
        "help": f"{info.help[:1].upper()}{info.help[1:].rstrip('.')}." if info.help else None,
        "required": info.required,
        "type": _type(info),
    }
    if info.kind is bool:
        said["is_flag"] = True
    if defaults is Defaults.SHOWN and not _is_absent(info.default):
        said["default"] = _typed(info)
    return click.option(*names, **{**said, **settings})


_TYPES = {bool: click.BOOL, int: click.INT, float: click.FLOAT, str: TEXT, Path: PATH}
_PATHS = {
    PathKind.FILE: FILE,
    PathKind.EXISTING_FILE: EXISTING_FILE,
    PathKind.EXISTING_DIRECTORY: EXISTING_DIRECTORY,
}


def _type(info: FieldInfo) -> click.ParamType[Any]:
    """The type of the value of one field, or of each element."""
    how = info.metadata
    path, choices = how.get("path"), how.get("choices")
    if path is not None:
        return output_file(path) if isinstance(path, OutputKind) else _PATHS[path]
    if issubclass(info.kind, Enum):
        return MemberOf(choices or info.kind)
    if choices:
        return click.Choice(choices)
    if "least" in how:
        return click.IntRange(how["least"], how.get("most"))
    if info.size:
        return SIZE if info.kind is int else FRACTION
    return TEXT if info.words else _TYPES[info.kind]


def _is_absent(value: object) -> bool:
    """Whether ``value`` means that the option was not given; 0 does not."""
    return value is None or value is False or value == ()


def _typed(info: FieldInfo) -> object:
    """The default of ``info`` as the user would type it."""
    if isinstance(info.default, Enum):
        return info.default.value
    if info.size and isinstance(info.default, int):
        text = format_bytes(info.default).replace(" ", "")
        return text if parse_size(text) == info.default else info.default
    return info.default


def _collected(
    declared: list[Callable[[Any], Any]],
    names: tuple[str, ...],
    argument: str,
    collect: Callable[[Mapping[str, Any]], object],
) -> Callable[[F], F]:
    """Apply the ``declared`` options; the command gets their values as one ``argument``."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def called(*args: Any, **given: Any) -> object:
            values = {name: given.pop(name) for name in names}
            return command(*args, **given, **{argument: collect(values)})

        return options(*declared)(called)  # type: ignore[return-value]

    return decorate


# Shared options ---------------------------------------------------------------------------------------------


#: The command gets the argument ``output``, an Output.
json_option = click.option(
    "--json",
    "output",
    is_flag=True,
    callback=lambda ctx, param, given: Output(OutputMode.JSON if given else OutputMode.HUMAN),
    help="Print one JSON object as the last line of stdout; tables go to stderr.",
)
timeline_option = click.option(
    "--timeline", type=output_file(OutputKind.TIMELINE), help="Write a Chrome trace for Perfetto."
)
record_trace_option = click.option(
    "--record-trace", type=output_file(OutputKind.TRACE), help="Record the cache's requests."
)
checksum_option = click.option(
    "--checksum",
    is_flag=True,
    help="Compute a checksum over all records at the end (see --json).",
)
_SET_KEY = (
    "Set a configuration key, such as model.d_model=512; commas separate list items (see --help-config)."
)


def set_option(text: str = _SET_KEY) -> Callable[[F], F]:
    """``--set KEY=VALUE``, repeatable; the command gets ``settings``, a tuple of texts. ``text``: the help."""
    return click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help=text)


def help_config_option(config: type[Any] | None = None) -> Callable[[F], F]:
    """``--help-config``: list every configuration key of ``config`` and exit. None: TrainConfig, imported only then, so that
    listing the commands does not load numpy and LMDB.
    """

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            from tierstore.train.config import TrainConfig

            click.echo(describe_config(config or TrainConfig))
            ctx.exit()

    return click.option(
        "--help-config",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="List the configuration keys with types and defaults, and exit.",
    )


def describe_config(cls: type[Any]) -> str:
    """Every key of ``cls`` with its type, default and help, as text."""
    lines = []
    for key in options_json(cls):
        default = "required" if key["default"] is None else f"default {key['default']}"
        lines.append(f"{key['name']}  ({key['type']}; {default})")
        lines += [f"    {key['help']}"] if key["help"] else []
    return "\n".join(lines)


def options_json(cls: type[Any]) -> list[dict[str, object]]:
    """Every key of ``cls`` with its type, default and help, one object for each key."""
    return [
        {
            "name": info.name,
            "type": info.type,
            "default": None if info.required else _shown(info.name, info.in_words(info.default)),
            "help": info.help,
        }
        for info in dotted_fields(cls)
    ]


def _shown(name: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(_shown(name, element) for element in value) or "empty"
    plain = getattr(value, "value", value)
    if isinstance(plain, int) and not isinstance(plain, bool) and (name.endswith("budget") or plain >= 2**30):
        return format_bytes(plain)
    return str(plain)


def config_overrides(settings: tuple[str, ...], options: Mapping[str, object]) -> dict[str, object]:
    """The overrides of a command line, for ``tierstore.config.load``.

    ``settings``: the texts of ``--set``. ``options``: values of options by dotted key, None for options that were not
    given. Raises ConfigError for a setting without a key, and for a key that is set twice.
    """
    overrides = {key: value for key, value in options.items() if value is not None}
    for setting in settings:
        typed, equals, value = setting.partition("=")
        key = typed.strip()
        if not equals or not key:
            raise ConfigError(f"--set: expected KEY=VALUE, got {setting!r}")
        if key in overrides:
            raise ConfigError(f"--set {key}: set more than once")
        # In `KEY = VALUE` blanks around the value are dropped; in `KEY=VALUE`, or if it is all blanks, they belong to it.
        overrides[key] = (value.strip() or value) if typed.endswith(" ") else value
    return overrides


# The configuration of a store -------------------------------------------------------------------------------


def with_stored_model(config: TrainConfig) -> TrainConfig:
    """``config`` with the imported model of its store; unchanged if the store holds no imported model.

    Raises ConfigError if ``[model]`` or ``[finetune]`` does not apply, StoreFormatError for a damaged description.
    """
    from tierstore.hf.spec import stored_spec
    from tierstore.model.config import ModelConfig
    from tierstore.train.config import FinetuneConfig

    spec = stored_spec(config.store, config.finetune, config.lora)
    if spec is None:
        if config.finetune != FinetuneConfig():
            raise ConfigError(
                f"finetune: {config.store} holds no imported model; configure the built-in one with [model]"
            )
        if config.lora.enabled:
            raise ConfigError(f"lora.rank: {config.store} holds no imported model; LoRA needs one")
        return config
    if config.model != ModelConfig():
        raise ConfigError(f"model: {config.store} holds an imported model; configure it with [finetune]")
    return dataclasses.replace(config, model=spec)


def deployed_settings(store: Path) -> dict[str, object]:
    """The settings of ``ServeConfig``, by dotted key, that ``tierstore deploy`` found best for ``store``; empty for a store
    that it did not make. Raises StoreFormatError.
    """
    from tierstore.deploy.records import Deployment

    deployment = Deployment.read(store)
    return {} if deployment is None else dict(deployment.settings)
