"""``tierstore bench report`` and ``compare``: what to make of documents that benchmarks saved."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore.cli.bench.results import comparison_json, show_comparison
from tierstore.cli.options import FILE, json_option, output_file
from tierstore.cli.output import Output
from tierstore.outputs import OutputKind


@click.command()
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


@click.command()
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
