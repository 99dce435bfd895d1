"""``tierstore bench``: one command for each benchmark, with options derived from its fields, and ``report`` and ``compare``.

Impossible output options are refused before the work. The end of each saves the document, compares it, writes the report,
and prints the JSON object last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.bench import benchmarks
from tierstore.bench.documents import Document, load_document, machine_facts, now, save_document
from tierstore.bench.harness import Benchmark, Progress
from tierstore.cli.main import CHECK_FAILED, DONE, CommandGroup, Interrupts, ended_by_sigterm
from tierstore.cli.options import (
    FILE,
    PATH,
    config_overrides,
    field_options,
    given_fields,
    help_config_option,
    json_option,
    option_fields,
    options,
    output_file,
    set_option,
)
from tierstore.cli.output import Output, ProgressBar
from tierstore.config import FieldInfo, load
from tierstore.errors import ConfigError, DataError
from tierstore.outputs import OutputKind, to_json
from tierstore.reports.page import check_report

if TYPE_CHECKING:
    from tierstore.bench.comparing import Comparison


class BenchGroup(CommandGroup):
    """The benchmarks; each is imported on first use."""

    _benchmarks = benchmarks()

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The benchmarks, then the commands on their documents."""
        own = self._benchmarks
        return [*own, *(name for name in super().list_commands(ctx) if name not in own)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, built from its benchmark on first use."""
        if cmd_name in self._benchmarks and cmd_name not in self.commands:
            module = importlib.import_module(f"tierstore.bench.{cmd_name}")
            self.add_command(benchmark_command(cmd_name, getattr(module, self._benchmarks[cmd_name])))
        return super().get_command(ctx, cmd_name)


@click.group(cls=BenchGroup)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Stress tests and benchmarks. Each prints a table; with --json the last line is one JSON object.

    --save FILE.json keeps all measurements, for `bench report` and --compare.
    """
    ctx.with_resource(ended_by_sigterm())


# Options ----------------------------------------------------------------------------------------------------


def benchmark_command(name: str, kind: type[Benchmark]) -> click.Command:
    """Build the command of the benchmark ``kind``."""
    configured = next((each for each in dataclasses.fields(kind) if "configuration" in each.metadata), None)  # type: ignore[arg-type]

    def command(
        output: Output, save: Path | None, html: Path | None, compare: Path | None, **given: Any
    ) -> int:
        from tierstore.bench.comparing import compare as compare_documents

        values = given_fields(kind, given)
        if configured is not None:
            values[configured.name] = _configuration(configured.metadata, option_fields(kind), given)
        benchmark = kind(**values)
        bench, started = benchmark.saved_as or name, now()
        if html is not None:
            check_report()
        old = None if compare is None else _earlier(compare, bench)
        with output.progress(label=f"bench {name}") as bar:
            found = benchmark.run(_CommandProgress(output, bar))
        for shown in (*found.shown, found.summary()):
            if isinstance(shown, str):
                output.line(shown)
            elif shown.rows:
                output.table(shown.title, list(shown.columns), shown.cells)
        figures = {key: to_json(value) for key, value in found.figures.items()}
        comparisons: list[Comparison] = []
        try:
            if save is not None or html is not None or old is not None:
                document = Document(
                    bench=bench,
                    options={
                        key: said for key, value in given.items() if (said := _plain(value)) is not None
                    },
                    machine=machine_facts(benchmark.measured_in),
                    started=started,
                    ended=now(),
                    measurements=tuple(found.measurements),
                    figures=figures,
                )
            if save is not None:  # first: a later error must not lose a long run's results
                save_document(document, save)
            if old is not None:
                try:
                    comparisons = [compare_documents(old, document)]
                except DataError as error:
                    raise DataError(f"{compare}: {error}") from error
                show_comparison(comparisons[0], output)
            if html is not None:
                from tierstore.bench.report import write_report  # matplotlib takes half a second to import

                write_report([document], html, comparisons=comparisons)
        finally:
            output.emit({**figures, **({"compared": comparisons[0]} if comparisons else {})})
        return CHECK_FAILED if found.failed else DONE

    decorators = field_options(kind)
    if configured is not None:
        decorators.append(set_option())
        if not configured.metadata["configuration"]:
            decorators = [
                click.argument("config", required=False, type=PATH),
                *decorators,
                help_config_option(),
            ]
    return click.command(name, help=kind.__doc__)(options(*decorators, _results_options)(command))


def _configuration(how: Mapping[str, Any], infos: list[FieldInfo], given: Mapping[str, Any]) -> Any:
    """The TrainConfig built from CONFIG, --set and the options that stand for its keys.

    ``how``: the field's ``configuration`` (prefixes of the keys that --set may set) and ``fixed`` (keys with a fixed value).
    """
    from tierstore.train.config import TrainConfig

    settings, only = given["settings"], how["configuration"]
    for key in (setting.partition("=")[0] for setting in settings):
        if only and not key.startswith(only):
            raise ConfigError(f"--set {key}: expected a key that begins with {' or '.join(only)}")
    keys = dict(how.get("fixed", {}))
    for info in infos:
        if "key" in info.metadata:
            value = given[info.name]
            keys[info.metadata["key"]] = info.default if value is None else value
    return load(TrainConfig, given.get("config"), config_overrides(settings, keys))


# Documents of a run ----------------------------------------------------------------------------------------


_results_options = options(
    json_option,
    click.option(
        "--save",
        metavar="FILE.json",
        type=output_file(OutputKind.DOCUMENT),
        help="Save all measurements and samples as JSON.",
    ),
    click.option(
        "--html",
        metavar="FILE",
        type=output_file(OutputKind.PAGE),
        help="Write an HTML report.",
    ),
    click.option(
        "--compare",
        metavar="OLD.json",
        type=FILE,
        help="Compare with an earlier --save file, as `bench compare` does.",
    ),
)


def _plain(value: object) -> float | str | None:
    """An option's value as a document stores it; None if the option was not given."""
    if value is None or value == ():
        return None
    if isinstance(value, tuple):
        return " ".join(str(_plain(one)) for one in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return str(value.value if isinstance(value, Enum) else value)


def _earlier(path: Path, bench: str) -> Document:
    """The document of an earlier run of ``bench``. Raises DataError."""
    old = load_document(path)
    if old.bench != bench:
        raise DataError(f"{path}: expected a document of bench {bench}, got one of {old.bench}")
    return old


def show_comparison(comparison: Comparison, output: Output) -> None:
    """Print the comparison."""
    from tierstore.bench.comparing import table

    for warning in comparison.warnings:
        output.line(f"warning: {warning}")
    columns, rows = table(comparison)
    output.table(f"bench {comparison.bench}: new against old, beyond the noise within runs", columns, rows)
    for where, labels in (("the old", comparison.only_old), ("the new", comparison.only_new)):
        if labels:
            output.line(f"only in {where} document: {'; '.join(labels)}")


# Running ----------------------------------------------------------------------------------------------------


class _CommandProgress(Progress):
    """Prints progress to the command's output; shows a bar from the first ``update``."""

    def __init__(self, output: Output, bar: ProgressBar) -> None:
        self._output = output
        self._bar = bar

    def say(self, text: str) -> None:
        self._output.line(text)

    def update(self, done: int, total: int, fields: Mapping[str, object]) -> None:
        self._bar.update(done, total, fields)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        with Interrupts.install() as interrupts:
            yield lambda: interrupts.requested


# Commands on documents --------------------------------------------------------------------------------------


@bench.command()
@click.argument("documents", nargs=-1, required=True, type=FILE)
@click.option(
    "--html", metavar="FILE", type=output_file(OutputKind.PAGE), required=True, help="HTML file to write."
)
@json_option
def report(documents: tuple[Path, ...], html: Path, output: Output) -> None:
    """Write one HTML page about DOCUMENTS, --save files of any benchmarks: targets, plots, tables, machines."""
    check_report()
    from tierstore.bench.report import write_report

    loaded = [load_document(path) for path in documents]
    write_report(loaded, html)
    output.line(f"{len(loaded)} benchmark{'s' if len(loaded) > 1 else ''} in {html}")
    output.emit({"html": str(html), "benches": [document.bench for document in loaded]})


@bench.command()
@click.argument("old", type=FILE)
@click.argument("new", type=FILE)
@json_option
def compare(old: Path, new: Path, output: Output) -> None:
    """Show what became slower or faster, beyond noise, between two --save files of a benchmark."""
    from tierstore.bench.comparing import compare as compared

    found = compared(load_document(old), load_document(new))
    show_comparison(found, output)
    output.emit(found.as_json())
