"""``tierstore bench``: one command for each benchmark, with options derived from its fields, and ``report`` and ``compare``.

``Session`` refuses impossible output options before the work. ``Session.end`` saves the document, compares it, writes the
report, and prints the JSON object last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.bench import benchmarks
from tierstore.bench.harness import Benchmark, ExistingPath, Progress
from tierstore.cli.main import CHECK_FAILED, DONE, CommandGroup, Interrupts, ended_by_sigterm
from tierstore.cli.options import (
    EXISTING_DIRECTORY,
    EXISTING_FILE,
    FILE,
    PATH,
    SIZE,
    Defaults,
    MemberOf,
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
from tierstore.errors import ConfigError, DataError
from tierstore.outputs import OutputKind, to_json

if TYPE_CHECKING:
    from tierstore.bench.comparing import Comparison
    from tierstore.bench.documents import Document, Measurement

_EXISTING = {ExistingPath.FILE: EXISTING_FILE, ExistingPath.DIRECTORY: EXISTING_DIRECTORY}


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
    infos = [info for info in dotted_fields(kind) if "help" in info.metadata and "." not in info.name]
    configured = next((each for each in dataclasses.fields(kind) if "configuration" in each.metadata), None)  # type: ignore[arg-type]

    def command(
        output: Output, save: Path | None, html: Path | None, compare: Path | None, **given: Any
    ) -> int:
        values = {info.name: given[info.name] for info in infos if _was_given(info, given[info.name])}
        if configured is not None:
            values[configured.name] = _configuration(configured.metadata, infos, given)
        benchmark = kind(**values)
        session = Session(benchmark, output, save=save, html=html, compare=compare)
        with output.progress(label=f"bench {name}") as bar:
            found = benchmark.run(_CommandProgress(output, bar))
        for shown in (*found.shown, found.summary()):
            if isinstance(shown, str):
                output.line(shown)
            elif shown.rows:
                output.table(shown.title, list(shown.columns), shown.cells)
        session.end(found.figures, found.measurements)
        return CHECK_FAILED if found.failed else DONE

    decorators = [_parameter(info) for info in infos]
    if configured is not None:
        decorators.append(set_option())
        if not configured.metadata["configuration"]:
            decorators = [
                click.argument("config", required=False, type=PATH),
                *decorators,
                help_config_option(),
            ]
    return click.command(name, help=kind.__doc__)(options(*decorators, _results_options)(command))


def _parameter(info: FieldInfo) -> Callable[[Any], Any]:
    """The option, or the argument, of one field."""
    how, settings = info.metadata, dict[str, Any](multiple=info.repeated)
    path = how.get("path")
    if path is not None:
        settings["type"] = output_file(path) if isinstance(path, OutputKind) else _EXISTING[path]
    elif info.size:
        settings["type"] = SIZE
    elif "least" in how:
        settings["type"] = click.IntRange(min=how["least"])
    elif "choices" in how:
        settings["type"] = MemberOf(how["choices"])
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
    """Whether the user gave the option; if not, the field keeps its default."""
    return value is not None and (value != () or info.metadata.get("shown", True))


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
        help="Save all measurements, with all samples, as JSON.",
    ),
    click.option(
        "--html",
        metavar="FILE",
        type=output_file(OutputKind.PAGE),
        help="Write an HTML report with plots (see bench report).",
    ),
    click.option(
        "--compare",
        metavar="OLD.json",
        type=FILE,
        help="Compare with an earlier --save file: what became slower or faster, beyond noise.",
    ),
)
#: The names of these options.
_RESULTS = ("output", "save", "html", "compare")


def _plain(value: object) -> float | str | None:
    """An option's value as a document stores it; None if the option was not given."""
    if value is None or value == ():
        return None
    if isinstance(value, tuple):
        return " ".join(str(_plain(one)) for one in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return str(value.value if isinstance(value, Enum) else value)


class Session:
    """One run of one benchmark, with the outputs that the user requested in addition to the table.

    Raises early what would otherwise fail after the work: DataError if the document of ``compare`` is unusable,
    CapabilityError if the report's libraries are missing.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        output: Output,
        *,
        save: Path | None,
        html: Path | None,
        compare: Path | None,
    ) -> None:
        from tierstore.bench.documents import load_document, now

        context = click.get_current_context()
        self._output, self._save, self._html, self._compared = output, save, html, compare
        self._bench = benchmark.saved_as or str(context.info_name)
        self._directory = benchmark.measured_in
        if html is not None:
            from tierstore.reports.page import check_report

            check_report()
        self._against = None if compare is None else load_document(compare)
        if self._against is not None and self._against.bench != self._bench:
            raise DataError(
                f"{compare}: expected a document of bench {self._bench}, got one of {self._against.bench}"
            )
        self._options = {
            name: plain
            for name, value in context.params.items()
            if name not in _RESULTS and (plain := _plain(value)) is not None
        }
        self._started = now()

    def end(self, result: Mapping[str, object], measurements: Iterable[Measurement]) -> None:
        """Save, compare and report the results, then print the JSON object; its key ``compared`` is the comparison.
        Raises DataError if nothing can be compared; the object is printed first.
        """
        figures = {key: to_json(value) for key, value in result.items()}
        compared: dict[str, object] = {}
        try:
            self._report(figures, measurements, compared)
        finally:
            self._output.emit(figures | compared)

    def _report(
        self, figures: Mapping[str, object], measurements: Iterable[Measurement], compared: dict[str, object]
    ) -> None:
        from tierstore.bench.documents import Document, machine_facts, now, save_document
        from tierstore.bench.report import write_report

        if self._save or self._html or self._against:
            document = Document(
                bench=self._bench,
                options=self._options,
                machine=machine_facts(self._directory),
                started=self._started,
                ended=now(),
                measurements=tuple(measurements),
                figures=figures,
            )
            if self._save is not None:  # first: a later error must not lose a long run's results
                save_document(document, self._save)
            comparisons = [] if self._against is None else [self._compare(self._against, document)]
            for comparison in comparisons:
                show_comparison(comparison, self._output)
                compared["compared"] = comparison_json(comparison)
            if self._html is not None:
                write_report([document], self._html, comparisons=comparisons)

    def _compare(self, old: Document, new: Document) -> Comparison:
        from tierstore.bench.comparing import compare

        try:
            return compare(old, new)
        except DataError as error:
            raise DataError(f"{self._compared}: {error}") from error


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """The comparison as JSON."""
    return {
        "bench": comparison.bench,
        "warnings": list(comparison.warnings),
        "measurements": [
            {
                "measurement": row.new.label,
                "unit": row.new.unit,
                "new_to_old_ratio": row.ratio,
                "low_ratio": row.low,
                "high_ratio": row.high,
                "verdict": row.word,
            }
            for row in comparison.rows
        ],
        "only_old": list(comparison.only_old),
        "only_new": list(comparison.only_new),
    }


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
    """Write one HTML page about DOCUMENTS, saved by any benchmarks with --save: targets, plots, tables, machines."""
    from tierstore.bench.documents import load_document
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
    """Show what became slower or faster from OLD to NEW, beyond noise. Both are --save files of the same benchmark."""
    from tierstore.bench.comparing import compare as compared
    from tierstore.bench.documents import load_document

    found = compared(load_document(old), load_document(new))
    show_comparison(found, output)
    output.emit(comparison_json(found))
