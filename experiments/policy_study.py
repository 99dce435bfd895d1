"""Which cache policy, when: every policy, tuned and bounded, on one routing trace in nine regimes and on recorded traces.

    python experiments/policy_study.py ROUTING.npz RUN.trace [--markdown study.md] [--html study.html]

For each regime: curves of all policies and of Belady's choice over capacity; at the focus also with a quota for each layer;
LFU-decay over half-lives; the tuner's choice on the first half, scored on the second against the best of everything tried;
and LFU-decay tuned alone against LRU. It prints the tables in Markdown (docs/RESULTS.md has the main ones).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from emulation import OUTPUT, finish, start

from tierstore import __version__
from tierstore.cache.config import Scope
from tierstore.cli.cache.options import ContractOptions, MachineOptions, html_option
from tierstore.cli.cache.output import check_html, write_html
from tierstore.cli.options import EXISTING_FILE, dataclass_options, output_file
from tierstore.errors import ConfigError, DataError
from tierstore.lab.candidates import Candidate
from tierstore.lab.costs import Machine, with_costs
from tierstore.lab.importing import SourceKind, detect_kind, import_trace
from tierstore.lab.miss_curves import REPORT_WINDOWS, all_policies, curves
from tierstore.lab.requests import Requests, load_requests
from tierstore.lab.results import Outcome, RegimeStudy, Role, Study, TuneResult
from tierstore.lab.simulate import Contract, PolicySpec, ReplaySetting, replay_each
from tierstore.lab.tuning import LEAST_STEPS, Hindsight, TuneOptions, half_life_map, regime_study, tune
from tierstore.outputs import OutputKind, write_output
from tierstore.trace.format import MAGIC
from tierstore.units import printable

T = TypeVar("T")
#: Nine regimes of one routing trace; a recorded run of our own is the tenth.
TOPK_REGIMES: Mapping[str, Mapping[str, object]] = {
    "decode, 1 sequence": {"regime": "decode", "sequences": 1},
    "decode, 8 sequences": {"regime": "decode", "sequences": 8},
    "decode, 32 sequences": {"regime": "decode", "sequences": 32},
    **{
        f"train, {tokens} tokens a step": {"regime": "train", "tokens_per_step": tokens}
        for tokens in (16, 64, 128, 256, 512, 2048)
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """What is studied. Capacities are fractions of what a trace asks for."""

    capacities: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
    focus: float = 0.4
    tuned_at: tuple[float, ...] = (0.2, 0.4)
    half_life_capacities: tuple[float, ...] = (0.2, 0.4, 0.6)
    weight_bytes: int = 17_301_504  # of an expert of an npz: 3 matrices of 2048 x 1408 in bf16
    contract: Contract = Contract.ATOMIC
    machine: Machine = field(default_factory=Machine)
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.focus not in self.capacities or self.focus not in self.tuned_at:
            raise ConfigError(
                f"focus: expected one of the capacities that are drawn and tuned, got {self.focus:g}"
            )


def run_study(
    sources: Sequence[Path], options: StudyOptions, say: Callable[[str], None] = lambda _: None
) -> Study:
    """Studies each of ``sources``: an npz with ``topk`` in the nine regimes, a trace as it was recorded.

    A regime that an npz has too few prompts or tokens for is left out, and ``say`` receives the reason. Raises DataError,
    ConfigError, BudgetError or OSError.
    """
    regimes = [
        _regime(name, requests, options, say)
        for source in sources
        for name, requests in _regimes(source, options, say)
    ]
    return Study(
        title="Cache policies by regime",
        regimes=tuple(regimes),
        assumptions=options.machine.assumptions,
        source=options.machine.source,
        version=__version__,
    )


def _regimes(
    source: Path, options: StudyOptions, say: Callable[[str], None]
) -> Iterator[tuple[str, Requests]]:
    """Names and requests of the regimes that one source is studied in."""
    with source.open("rb") as file:
        recorded = file.read(len(MAGIC)) == MAGIC
    if recorded:
        yield printable(source.stem), load_requests(source)
        return
    if detect_kind(source) is not SourceKind.NPZ:
        raise ConfigError(f"{source}: expected a trace or an npz with topk; import it first")
    left_out: list[DataError] = []
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "regime.trace"
        for name, settings in TOPK_REGIMES.items():
            say(f"{name}: importing")
            chosen = {**settings, "weight_bytes": options.weight_bytes}
            try:
                import_trace(source, target, kind=SourceKind.NPZ, options=chosen)
                requests = load_requests(target, name=f"{source.name}: {name}")
                if requests.step_count < LEAST_STEPS:
                    found = f"expected at least {LEAST_STEPS} steps, found {requests.step_count}"
                    raise DataError(f"{source}: {name}: {found}")
            except DataError as error:  # too few prompts or tokens for this one
                say(f"{name}: left out: {error}")
                left_out.append(error)
                continue
            yield name, requests
    if len(left_out) == len(TOPK_REGIMES):
        raise left_out[0]


def _regime(name: str, requests: Requests, options: StudyOptions, say: Callable[[str], None]) -> RegimeStudy:
    replay: dict[str, Any] = {"contract": options.contract, "threads": options.threads}
    machine, everything = options.machine, TuneOptions(**replay, seed=options.seed, hindsight=Hindsight.ALL)
    tunings = {}
    for capacity in options.tuned_at:
        say(f"{name}: tuning at {capacity:.0%}")
        tunings[capacity] = tune(requests, capacity, everything, machine=machine)
    say(f"{name}: tuning LFU-decay against LRU")
    alone = replace(
        everything, policies=("lfu-decay",), scopes=(Scope.GLOBAL,), baseline=Candidate(PolicySpec("lru")),
        hindsight=Hindsight.FINALISTS,
    )  # fmt: skip
    against_lru = tune(requests, options.focus, alone, machine=machine)
    say(f"{name}: half-lives")
    lives = half_life_map(requests, options.half_life_capacities, **replay)
    say(f"{name}: curves")
    found = curves(
        requests,
        all_policies(requests),
        options.capacities,
        machine=machine,
        windows=REPORT_WINDOWS,
        **replay,
    )
    tuning = tunings[options.focus]
    drawn = regime_study(requests, found, name=name, tuning=tuning, half_life=lives, **replay)
    say(f"{name}: quotas for layers")
    return replace(
        drawn,
        focus=options.focus,
        against_lru=against_lru.result,
        elsewhere=tuple(tuning.result for at, tuning in tunings.items() if at != options.focus),
        layered=_layered(requests, options),
    )


def _layered(requests: Requests, options: StudyOptions) -> tuple[Outcome, ...]:
    """Every policy at the focus with equal quotas; none where there is one layer only."""
    if requests.info.layers < 2:
        return ()
    capacity = requests.table.frames_of(options.focus)
    settings = [
        ReplaySetting(spec, capacity, Scope.LAYER, options.contract) for spec in all_policies(requests)
    ]
    outcomes = replay_each(
        requests, settings, lambda each: with_costs(requests, each, options.machine), threads=options.threads
    )
    return tuple(outcomes)


# Tables -----------------------------------------------------------------------------------------------------


_WITHIN = 0.01  # of the best in hindsight: what a choice is held to


def study_markdown(study: Study) -> str:
    """Every table of the study, each under a heading."""
    regimes = study.regimes
    writing = [regime for regime in regimes if any(one.written_bytes for one in regime.focused())]

    def misses(one: Outcome) -> str:
        return _ratio(one.miss_ratio)

    parts = [
        ("Regimes", _regime_table(regimes)),
        ("Miss ratio, one cache for all layers", _by_policy(regimes, RegimeStudy.focused, misses)),
        ("Miss ratio, a quota for each layer", _by_policy(regimes, lambda regime: regime.layered, misses)),
        ("Distance from the bound", _distances(regimes)),
        (
            "Written back, MB a step",
            _by_policy(writing, RegimeStudy.focused, lambda one: f"{one.written_per_step / 1e6:,.0f}"),
        ),
        (
            "Read and written, MB a step",
            _by_policy(
                writing,
                RegimeStudy.focused,
                lambda one: f"{(one.read_per_step + one.written_per_step) / 1e6:,.0f}",
            ),
        ),
        ("LFU-decay tuned on the first half, against LRU on the second", _against_lru(regimes)),
        ("The tuner's choice on the first half, scored on the second", _choices(regimes)),
        ("Miss ratio over capacity", _over_capacity(regimes)),
    ]
    focus = regimes[0].focus if regimes else 0.0
    head = (
        f"All miss ratios and bytes are simulated, at a capacity of {focus:.0%} of what the trace asks for unless "
        "said otherwise, with no lookahead (nothing is fetched ahead); "
        "contract and hash of each trace are in the first table."
        + (f" Stalls and drive wear (in the report) are estimates: {study.source}." if study.source else "")
        + "\n"
    )
    return head + "".join(f"\n### {title}\n\n{table}" for title, table in parts if table)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its first column set left; nothing without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    head = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return "\n".join([*head, *lines]) + "\n"


def _cells(rows: Iterable[T], columns: Sequence[tuple[str, Callable[[T], str]]]) -> str:
    """The table of ``rows``, whose ``columns`` each have a title and the text of a row."""
    return _table([title for title, _ in columns], [[text(row) for _, text in columns] for row in rows])


def _ratio(value: float) -> str:
    return f"{value:.4f}".removeprefix("0")


def _regime_table(regimes: Sequence[RegimeStudy]) -> str:
    return _cells(
        regimes,
        [
            ("regime", lambda regime: regime.name),
            ("steps", lambda regime: f"{regime.trace.steps:,}"),
            ("requests", lambda regime: f"{regime.trace.requests:,}"),
            ("records", lambda regime: f"{regime.trace.records:,}"),
            (
                "asked for of a layer",
                lambda regime: f"{regime.active_per_layer:.1f} of {regime.records_per_layer:.0f}",
            ),
            ("contract", lambda regime: regime.contract),
            ("trace", lambda regime: f"`{regime.trace.sha256[:12]}`"),
        ],
    )


def _by_policy(
    regimes: Sequence[RegimeStudy],
    outcomes_of: Callable[[RegimeStudy], Sequence[Outcome]],
    shown: Callable[[Outcome], str],
) -> str:
    """A row a policy, a column a regime; the best policy of a column is bold."""
    found = [(regime.name, {one.label: one for one in outcomes_of(regime)}) for regime in regimes]
    found = [(name, outcomes) for name, outcomes in found if outcomes]
    labels = list(dict.fromkeys(label for _, outcomes in found for label in outcomes))
    if not found:
        return ""

    def cell(outcomes: dict[str, Outcome], label: str) -> str:
        if label not in outcomes:
            return "-"
        text = shown(outcomes[label])
        policies = [one for one in outcomes.values() if one.role is Role.POLICY]
        least = min(policies, key=lambda one: float(shown(one).replace(",", "")))
        return f"**{text}**" if outcomes[label] in policies and text == shown(least) else text

    no_bound = {one.label for _, all_ in found for one in all_.values() if one.role is Role.CLAIRVOYANT}
    rows = [
        [f"{label} (clairvoyant)" if label in no_bound else label, *(cell(of, label) for _, of in found)]
        for label in labels
    ]
    return _table(["policy", *(name for name, _ in found)], rows)


def _distances(regimes: Sequence[RegimeStudy]) -> str:
    rows = []
    for regime in regimes:
        outcomes = regime.focused()
        policies = [one for one in outcomes if one.role is Role.POLICY]
        least = next((one for one in outcomes if one.role is not Role.POLICY), None)
        if least is None:
            continue
        bound = least.miss_ratio
        shown = _ratio(bound) if least.role is Role.BOUND else f"no bound; clairvoyant {_ratio(bound)}"
        best = min(policies, key=lambda one: one.miss_ratio)
        named = {one.policy: one for one in policies}
        above = [
            f"{named[name].miss_ratio - bound:+.4f}" if name in named else "-"
            for name in ("lru", "lfu-decay", "next-use")
        ]
        rows.append((regime.name, shown, best.label, f"{best.miss_ratio - bound:+.4f}", *above))
    columns = ("regime", "bound", "best policy", "best above it", "LRU above it", "LFU-decay", "next-use")
    return _table(columns, rows)


def _against_lru(regimes: Sequence[RegimeStudy]) -> str:
    return _cells(
        [(regime, tuned) for regime in regimes if (tuned := regime.against_lru) is not None],
        [
            ("regime", lambda of: of[0].name),
            ("tuned", lambda of: of[1].chosen.label),
            ("LRU", lambda of: _ratio(of[1].baseline.miss_ratio)),
            ("LFU-decay", lambda of: _ratio(of[1].chosen.miss_ratio)),
            (
                "gain, 95% interval",
                lambda of: f"{of[1].gain:+.4f} ({of[1].gain_low:+.4f} to {of[1].gain_high:+.4f})",
            ),
            ("verdict", lambda of: of[1].verdict.value),
        ],
    )


def _choices(regimes: Sequence[RegimeStudy]) -> str:
    table = _cells(
        [(regime, tuned) for regime in regimes for tuned in _tunings(regime)],
        [
            ("regime, capacity", lambda of: f"{of[0].name}, {of[1].chosen.capacity_fraction:.0%}"),
            ("chosen", lambda of: f"{of[1].chosen.label}, {of[1].chosen.scope}"),
            ("misses", lambda of: _ratio(of[1].chosen.miss_ratio)),
            ("default", lambda of: _ratio(of[1].baseline.miss_ratio)),
            ("best tried, in hindsight", lambda of: f"{of[1].best.label}, {of[1].best.scope}"),
            ("misses", lambda of: _ratio(of[1].best.miss_ratio)),
            ("regret", lambda of: f"{of[1].regret:.2%}"),
            ("verdict", lambda of: of[1].verdict.value),
        ],
    )
    return table and f"{table}\n{_near(regimes)}\n"


def _near(regimes: Sequence[RegimeStudy]) -> str:
    """How many choices are close to the best tried: of all cases, and of the regimes, at each capacity."""
    choices = {regime.name: [tuned.regret <= _WITHIN for tuned in _tunings(regime)] for regime in regimes}
    tuned = {name: near for name, near in choices.items() if near}
    cases = [near for each in tuned.values() for near in each]
    return (
        f"Within {_WITHIN:.0%} of the best tried, in hindsight: {sum(cases)} of {len(cases)} cases; "
        f"{sum(map(all, tuned.values()))} of {len(tuned)} regimes, at every capacity."
    )


def _tunings(regime: RegimeStudy) -> list[TuneResult]:
    return sorted(regime.tunings, key=lambda tuned: tuned.chosen.capacity_fraction)


def _over_capacity(regimes: Sequence[RegimeStudy]) -> str:
    """LRU, LFU-decay, the best policy of each capacity, and the bound or what is clairvoyant."""
    columns = sorted({_percent(point) for regime in regimes for point in regime.curves[0].points})
    rows = []
    for regime in regimes:
        points = {
            _percent(each[0]): each for each in zip(*(curve.points for curve in regime.curves), strict=True)
        }
        for name in ("lru", "lfu-decay", "best", Role.BOUND.value, Role.CLAIRVOYANT.value):
            cells = [_chosen(name, points[percent]) if percent in points else "" for percent in columns]
            if any(cells):
                rows.append((f"{regime.name}: {name}", *(cell or "-" for cell in cells)))
    return _table(["regime, policy", *(f"{percent}%" for percent in columns)], rows)


def _percent(one: Outcome) -> int:
    return round(100 * one.capacity_fraction)


def _chosen(name: str, outcomes: Sequence[Outcome]) -> str:
    role = Role.POLICY if name in ("lru", "lfu-decay", "best") else Role(name)
    among = [one for one in outcomes if one.role is role and name in ("best", role.value, one.policy)]
    return _ratio(min(one.miss_ratio for one in among)) if among else ""


# The command ------------------------------------------------------------------------------------------------


@click.command(help=__doc__)
@click.argument("sources", nargs=-1, required=True, type=EXISTING_FILE)
@click.option("--markdown", type=output_file(OutputKind.TABLES), help="Write the tables here.")
@dataclass_options(ContractOptions, "replay")
@dataclass_options(MachineOptions, "figures")
@html_option
def study(
    sources: tuple[Path, ...],
    markdown: Path | None,
    replay: ContractOptions,
    figures: MachineOptions,
    html: Path | None,
) -> None:
    check_html(html)
    options = StudyOptions(**replay.arguments(), machine=figures.machine())
    found = run_study(sources, options, say=OUTPUT.line)
    tables = study_markdown(found)
    OUTPUT.line(tables)
    if markdown is not None:
        write_output(markdown, OutputKind.TABLES, tables)
    if html is not None:
        write_html(html, found, OUTPUT)
    finish(found)


if __name__ == "__main__":
    start(study)
