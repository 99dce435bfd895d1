"""``tierstore bench``: a command a benchmark, with options derived from the benchmark's fields; report and compare."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tierstore.bench import BENCHMARKS
from tierstore.bench.harness import Benchmark, ExistingPath, Found, Progress
from tierstore.cli.bench.io import io
from tierstore.cli.bench.machine import machine
from tierstore.cli.bench.order import order
from tierstore.cli.bench.overlap import overlap
from tierstore.cli.bench.results import (
    CHECK_FAILED,
    Reporting,
    comparison_json,
    results_options,
    show_comparison,
)
from tierstore.cli.bench.scale import scale
from tierstore.cli.bench.tiers import tiers
from tierstore.cli.bench.train import train
from tierstore.cli.groups import CommandGroup
from tierstore.cli.interrupts import Interrupts, ended_by_sigterm
from tierstore.cli.options import (
    EXISTING_DIRECTORY,
    EXISTING_FILE,
    FILE,
    PATH,
    SIZE,
    Defaults,
    config_overrides,
    declared_option,
    help_config_option,
    json_option,
    options,
    output_file,
    set_option,
)
from tierstore.cli.output import Output, ProgressBar
from tierstore.config import FieldInfo, dotted_fields, load
from tierstore.errors import ConfigError
from tierstore.outputs import OutputKind

_EXISTING = {ExistingPath.FILE: EXISTING_FILE, ExistingPath.DIRECTORY: EXISTING_DIRECTORY}


class BenchGroup(CommandGroup):
    """The benchmarks of the table, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The table's benchmarks, then what is done with their documents."""
        return [*BENCHMARKS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, derived from its benchmark."""
        if cmd_name in BENCHMARKS and cmd_name not in self.commands:
            self.add_command(_command(cmd_name))
        return super().get_command(ctx, cmd_name)


@click.group(cls=BenchGroup)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Stress tests and benchmarks. Each prints a table; with --json the last line is one object.

    With --save FILE.json all that was measured is kept, for `bench report` and --compare.
    """
    ctx.with_resource(ended_by_sigterm())


# Options ----------------------------------------------------------------------------------------------------


def _command(name: str) -> click.Command:
    """The command of a benchmark."""
    kind: type[Benchmark] = getattr(importlib.import_module(f"tierstore.bench.{name}"), BENCHMARKS[name])
    infos = [info for info in dotted_fields(kind) if "help" in info.metadata and "." not in info.name]
    configured = next((each for each in dataclasses.fields(kind) if "configuration" in each.metadata), None)  # type: ignore[arg-type]

    def command(reporting: Reporting, **given: Any) -> int:
        values = {info.name: given[info.name] for info in infos if _was_given(info, given[info.name])}
        if configured is not None:
            values[configured.name] = _configuration(configured.metadata["configuration"], infos, given)
        benchmark = kind(**values)
        session = reporting.begin(name=benchmark.saved_as, directory=benchmark.measured_in)
        with _CommandProgress(session.output, f"bench {name}") as progress:
            found = benchmark.run(progress)
        _show(found, session.output)
        session.end(found.figures, found.measurements)
        return CHECK_FAILED if found.failed else 0

    decorators = [_parameter(info) for info in infos]
    if configured is not None:
        decorators.append(set_option())
        if not configured.metadata["configuration"]:
            decorators = [
                click.argument("config", required=False, type=PATH),
                *decorators,
                help_config_option(),
            ]
    return click.command(name, help=kind.__doc__)(options(*decorators, results_options())(command))


def _parameter(info: FieldInfo) -> Callable[[Any], Any]:
    """The option of one field, or its argument."""
    how, settings = info.metadata, dict[str, Any](multiple=info.repeated)
    path = how.get("path")
    if path is not None:
        settings["type"] = output_file(path) if isinstance(path, OutputKind) else _EXISTING[path]
    elif info.size:
        settings["type"] = SIZE
    elif "least" in how:
        settings["type"] = click.IntRange(min=how["least"])
    elif "choices" in how:
        settings["type"] = click.Choice([member.value for member in how["choices"]])
    elif info.kind in (int, str):
        settings["type"] = info.kind
    if how.get("argument"):
        kind = settings.get("type", PATH)
        return click.argument(info.name, nargs=-1 if info.repeated else 1, required=info.required, type=kind)
    if "typed" in how:
        settings["default"] = how["typed"]
    names = (how.get("flag", f"--{info.name.replace('_', '-')}"), info.name)
    return declared_option(
        info, names, settings, Defaults.SHOWN if how.get("shown", True) else Defaults.ELSEWHERE
    )


def _was_given(info: FieldInfo, value: object) -> bool:
    """Whether ``value`` is not that of an option that was left out, for which the field's default stands."""
    return value is not None and (value != () or info.metadata.get("shown", True))


def _configuration(only: tuple[str, ...], infos: list[FieldInfo], given: Mapping[str, Any]) -> Any:
    """The TrainConfig of CONFIG, --set and the options that stand for keys of it. ``only``: how keys must begin."""
    from tierstore.train.config import TrainConfig

    settings = given["settings"]
    for key in (setting.partition("=")[0] for setting in settings):
        if only and not key.startswith(only):
            raise ConfigError(f"--set {key}: expected a key that begins with {' or '.join(only)}")
    keys = {info.metadata["key"]: given[info.name] for info in infos if "key" in info.metadata}
    return load(TrainConfig, given.get("config"), config_overrides(settings, keys))


# Running ----------------------------------------------------------------------------------------------------


class _CommandProgress(Progress):
    """Progress on the command's output; a bar once there is something to count."""

    def __init__(self, output: Output, label: str) -> None:
        self._output, self._label = output, label
        self._stack = ExitStack()
        self._bar: ProgressBar | None = None

    def __enter__(self) -> _CommandProgress:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        self._output.line(text)

    def update(self, done: int, total: int, fields: Mapping[str, object]) -> None:
        if self._bar is None:
            self._bar = self._stack.enter_context(self._output.progress(total, label=self._label))
        self._bar.update(done, total, fields)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        with Interrupts.heard() as interrupts:
            yield lambda: interrupts.asked


def _show(found: Found, output: Output) -> None:
    for shown in (*found.shown, found.summary()):
        if isinstance(shown, str):
            output.line(shown)
        elif shown.rows:
            output.table(shown.title, list(shown.columns), shown.cells)


for _old in (io, tiers, train, order, overlap, machine, scale):
    bench.add_command(_old)


# What is done with documents --------------------------------------------------------------------------------


@bench.command()
@click.argument("documents", nargs=-1, required=True, type=FILE)
@click.option(
    "--html", metavar="FILE", type=output_file(OutputKind.PAGE), required=True, help="The page to write."
)
@json_option
def report(documents: tuple[Path, ...], html: Path, output: Output) -> None:
    """One HTML page of DOCUMENTS, which any benchmarks saved with --save: targets, plots, tables, machines."""
    from tierstore.bench.results.document import load_document
    from tierstore.bench.results.report import write_report

    loaded = [load_document(path) for path in documents]
    write_report(loaded, html)
    output.line(f"{len(loaded)} benchmark{'s' if len(loaded) > 1 else ''} in {html}")
    output.emit({"html": str(html), "benches": [document.bench for document in loaded]})


@bench.command()
@click.argument("old", type=FILE)
@click.argument("new", type=FILE)
@json_option
def compare(old: Path, new: Path, output: Output) -> None:
    """What became slower or faster from OLD to NEW, beyond noise: two files that one benchmark saved with --save."""
    from tierstore.bench.results.comparing import compare as compared
    from tierstore.bench.results.document import load_document

    found = compared(load_document(old), load_document(new))
    show_comparison(found, output)
    output.emit(comparison_json(found))
