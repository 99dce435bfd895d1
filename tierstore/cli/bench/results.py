"""What every benchmark's command shares: ``--json``, ``--save``, ``--html`` and ``--compare``, and what they do.

::

    @results_options()
    def commit(..., reporting: Reporting) -> None:
        session = reporting.begin(directory=store)      # before the work: refuses what could not be reported
        result = run(...)
        session.output.table(...)
        session.end(result, measurements(result))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.options import FILE, PATH, SIZE, F, bundled, json_option, options, output_file
from tierstore.cli.output import Output, finite
from tierstore.errors import DataError
from tierstore.outputs import OutputKind

if TYPE_CHECKING:
    from tierstore.bench.results.comparing import Comparison
    from tierstore.bench.results.document import Document, Measurement
    from tierstore.bench.results.figures import Figures

#: Exit status where a check of a benchmark failed.
CHECK_FAILED = 1
#: Where benchmarks make their stores without ``--store``.
WORK_DIRECTORY = Path("tierstore-bench")


def work_directory_option(command: F) -> F:
    """``--store``: the argument ``store``, None for ``WORK_DIRECTORY``."""
    return click.option("--store", type=PATH, help="A directory to make, measure in, and remove.")(command)


def namespace_option(command: F) -> F:
    """``--namespace-bandwidth``: the argument ``namespace_bandwidth``, bytes a second; 0 where it was not given."""
    return click.option(
        "--namespace-bandwidth",
        type=SIZE,
        default=0,
        metavar="SIZE",
        help="Ranks in network namespaces, in which each sends so many bytes a second (needs root, ip and tc).",
    )(command)


def results_options() -> Callable[[F], F]:
    """The four options, as one argument ``reporting`` of the command."""

    return options(
        json_option,
        click.option(
            "--save",
            metavar="FILE.json",
            type=output_file(OutputKind.DOCUMENT),
            help="Write everything, with all samples.",
        ),
        click.option(
            "--html",
            metavar="FILE",
            type=output_file(OutputKind.PAGE),
            help="Write a report with plots (see bench report).",
        ),
        click.option(
            "--compare",
            metavar="OLD.json",
            type=FILE,
            help="Say what became slower or faster than in this --save, beyond noise.",
        ),
        bundled(Reporting, "reporting"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """What was asked for beside the table."""

    output: Output
    save: Path | None
    html: Path | None
    compare: Path | None

    def begin(self, *, name: str | None = None, directory: Path | None = None) -> Session:
        """Call it before the work. ``name``: in documents, where it is not the command's. ``directory``: where the benchmark
        measures; the document names its file system and device.

        Raises errors that would otherwise come after the work: DataError for a document that cannot be compared with,
        CapabilityError without the report's libraries.
        """
        from tierstore.bench.results.document import load_document, now

        context = click.get_current_context()
        bench = name or str(context.info_name)
        if self.html is not None:
            from tierstore.lab.reports.page import check_report

            check_report()
        against = None if self.compare is None else load_document(self.compare)
        if against is not None and against.bench != bench:
            raise DataError(
                f"{self.compare}: expected a document of bench {bench}, got one of {against.bench}"
            )
        own = {field.name for field in fields(self)}
        options = {
            name: plain
            for name, value in context.params.items()
            if name not in own and (plain := _plain(value)) is not None
        }
        return Session(
            asked=self,
            bench=bench,
            options=options,
            against=against,
            directory=directory,
            started=now(),
            output=self.output,
        )


def _plain(value: object) -> float | str | None:
    """An option's value as a document holds it; None where it was not given."""
    if value is None or value == ():
        return None
    if isinstance(value, tuple):
        return " ".join(str(_plain(one)) for one in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return str(value.value if isinstance(value, Enum) else value)


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of one benchmark."""

    asked: Reporting
    bench: str
    options: Mapping[str, float | str]
    against: Document | None
    directory: Path | None
    started: str
    output: Output

    def end(self, result: Figures | Mapping[str, object], measurements: Iterable[Measurement]) -> None:
        """After the work and its table: saves, compares, reports, and prints the object of ``--json``, in which the
        comparison is ``compared``. Raises DataError where there is nothing to compare; the object is printed first.
        """
        from tierstore.bench.harness import plain
        from tierstore.bench.results.figures import Figures, to_json

        figures = to_json(result) if isinstance(result, Figures) else plain(result)
        compared: dict[str, object] = {}
        try:
            self._report(figures, measurements, compared)
        finally:
            self.output.emit(figures | compared)

    def _report(
        self, result: Mapping[str, object], measurements: Iterable[Measurement], compared: dict[str, object]
    ) -> None:
        from tierstore.bench.results.document import Document, machine_facts, now, save_document
        from tierstore.bench.results.report import write_report

        if self.asked.save or self.asked.html or self.against:
            figures = finite(result)
            assert isinstance(figures, Mapping)
            document = Document(
                bench=self.bench,
                options=self.options,
                machine=machine_facts(self.directory),
                started=self.started,
                ended=now(),
                measurements=tuple(measurements),
                figures=figures,
            )
            if self.asked.save is not None:  # first: it may be the end of a long run
                save_document(document, self.asked.save)
            comparisons = [] if self.against is None else [self._compare(self.against, document)]
            for comparison in comparisons:
                show_comparison(comparison, self.output)
                compared["compared"] = comparison_json(comparison)
            if self.asked.html is not None:
                write_report([document], self.asked.html, comparisons=comparisons)

    def _compare(self, old: Document, new: Document) -> Comparison:
        from tierstore.bench.results.comparing import compare

        try:
            return compare(old, new)
        except DataError as error:
            raise DataError(f"{self.asked.compare}: {error}") from error


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """The comparison for programs."""
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
    """The comparison for people."""
    from tierstore.bench.results.comparing import table

    for warning in comparison.warnings:
        output.line(f"warning: {warning}")
    columns, rows = table(comparison)
    output.table(f"bench {comparison.bench}: new against old, beyond the noise within runs", columns, rows)
    for where, labels in (("the old", comparison.only_old), ("the new", comparison.only_new)):
        if labels:
            output.line(f"only in {where} document: {'; '.join(labels)}")
