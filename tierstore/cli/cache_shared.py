"""What the cache commands do alike: read a trace, show how far they are, write a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.cli.cache_output import show_trace
from tierstore.cli.output import Output
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.results import RegimeStudy, Study

__all__ = ["check_html", "load_trace_requests", "stage_progress", "study_of", "write_html"]


def load_trace_requests(trace: Path, output: Output, warmup_steps: int = 0) -> Requests:
    """The requests of a trace, with a line on them. Raises ConfigError for a warm-up that leaves nothing."""
    from tierstore.lab.requests import load_requests

    requests = load_requests(trace)
    show_trace(requests, output)
    if warmup_steps >= requests.step_count:
        raise ConfigError(f"--warmup: expected less than the {requests.step_count} steps of {trace}")
    return requests


@contextmanager
def stage_progress(output: Output, label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function that hears of each stage how much of it is done."""
    with output.progress(1, label=label) as progress:
        yield lambda stage, done, total: progress.update(done, total, {"stage": stage})


def check_html(html: Path | None) -> None:
    """Before the work: a report that cannot be written is refused."""
    if html is None:
        return
    from tierstore.lab.report import check_report

    check_report()
    if not html.absolute().parent.is_dir():
        raise ConfigError(f"--html: {html.absolute().parent} is no directory")


def write_html(html: Path, study: Study, output: Output) -> None:
    """Writes a report and says where."""
    from tierstore.lab.report import write_report

    write_report(study, html)
    output.line(f"report: {html}")


def study_of(regime: RegimeStudy, machine: Machine) -> Study:
    """A report of one regime."""
    from tierstore import __version__
    from tierstore.lab.results import Study

    return Study(
        title=f"Cache policies on {regime.name}",
        regimes=(regime,),
        assumptions=machine.assumptions,
        version=__version__,
    )
