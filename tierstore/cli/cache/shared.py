"""What the cache commands do alike: read a trace, show how far they are, write a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.cli.cache.output import show_trace
from tierstore.cli.output import Output
from tierstore.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.results import Outcome, RegimeStudy, Study
    from tierstore.lab.simulate import PolicySpec


def load_trace_requests(
    trace: Path, output: Output, warmup_steps: int = 0, pins: Sequence[str] = ()
) -> Requests:
    """The requests of a trace, with a line on them. Raises ConfigError for a warm-up that leaves nothing, or for
    what cannot be pinned."""
    from tierstore.lab.requests import load_requests, parse_pins, pin

    requests = load_requests(trace)
    if pins:
        requests = pin(requests, parse_pins(pins, name="--pin"), name="--pin")
    show_trace(requests, output)
    if warmup_steps >= requests.step_count:
        raise ConfigError(f"--warmup: expected less than the {requests.step_count} steps of {trace}")
    return requests


def recorded_outcomes(
    trace: Path,
    requests: Requests,
    specs: Sequence[PolicySpec],
    frames: Sequence[int],
    replay: Mapping[str, Any],
) -> list[Outcome]:
    """Outcomes with the prefetches of the recorded run. Raises ConfigError naming the option, or BudgetError."""
    from tierstore.lab.live import recording_of, replay_recorded
    from tierstore.lab.simulate import Contract, ReplaySetting

    recording = recording_of(trace, requests)
    if recording is None:
        raise ConfigError(f"--lookahead recorded: {trace} has no prefetches of a run that takes steps")
    if requests.table.pins:
        raise ConfigError("--pin: expected --lookahead none: a live cache pins nothing")
    if replay["contract"] is not Contract.ATOMIC:
        raise ConfigError("--lookahead recorded: expected --contract event-atomic, as a run replays")
    others = [spec.name for spec in specs if not spec.runs]
    if others:
        raise ConfigError(f"--lookahead recorded: expected policies, got {others[0]}, which knows the future")
    settings = [ReplaySetting(spec, size, replay["scope"]) for spec in specs for size in frames]
    found = []
    replays = replay_recorded(requests, recording, settings, threads=replay["threads"])
    for setting, replayed in zip(settings, replays, strict=True):
        if replayed is None:
            raise BudgetError(
                f"--capacity: {setting.capacity_frames} frames, of which prefetches hold "
                f"{recording.lookahead_at(setting.capacity_frames)}, are too small for {setting.policy.name}"
            )
        found.append(replayed.outcome(requests, slice(replay["warmup_steps"], None)))
    return found


@contextmanager
def stage_progress(output: Output, label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with a stage's name, what is done of it, and its total."""
    with output.progress(1, label=label) as progress:
        yield lambda stage, done, total: progress.update(done, total, {"stage": stage})


def check_html(html: Path | None) -> None:
    """Before the work: a report that cannot be made is refused."""
    if html is None:
        return
    from tierstore.lab.reports.page import check_report

    check_report()


def write_html(html: Path, study: Study, output: Output) -> None:
    """Writes a report and says where."""
    from tierstore.lab.reports.report import write_report

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
        source=machine.source,
        version=__version__,
    )
