"""A study: one routing trace in several regimes, recorded traces as they are, every policy, tuned and bounded.

For each regime: curves of all policies and of Belady's choice over capacity; at the focus also with a quota for each
layer; LFU-decay over half-lives; the tuner's choice on the first half, scored on the second against the best
of everything tried; and LFU-decay tuned alone against LRU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TypeAlias

from tierstore import __version__
from tierstore._native import Detail
from tierstore.cache.config import Scope
from tierstore.errors import ConfigError, DataError
from tierstore.lab.candidates import Candidate, half_lives, lfu_decay
from tierstore.lab.costs import Machine, with_costs
from tierstore.lab.importing import SourceKind, detect_kind, import_trace
from tierstore.lab.miss_curves import all_policies, curves, survey
from tierstore.lab.requests import Capacity, Requests, load_requests
from tierstore.lab.results import Curve, HalfLifeMap, Outcome, RegimeStudy, Study
from tierstore.lab.simulate import (
    Contract,
    OnProgress,
    PolicySpec,
    Replayed,
    ReplaySetting,
    contract_name,
    replay_each,
)
from tierstore.lab.tuning import LEAST_STEPS, Hindsight, TuneOptions, Tuning, tune
from tierstore.trace.format import MAGIC
from tierstore.units import printable

_WINDOWS = 50

OnRegime: TypeAlias = Callable[[str, str], None]
"""Called with the regime, and what the study does with it."""

TOPK_REGIMES: Mapping[str, Mapping[str, object]] = {
    "decode, 1 sequence": {"regime": "decode", "sequences": 1},
    "decode, 8 sequences": {"regime": "decode", "sequences": 8},
    "decode, 32 sequences": {"regime": "decode", "sequences": 32},
    **{
        f"train, {tokens} tokens a step": {"regime": "train", "tokens_per_step": tokens}
        for tokens in (16, 64, 128, 256, 512, 2048)
    },
}
"""Nine regimes of one routing trace; a recorded run of our own is the tenth."""


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
    sources: Sequence[Path], options: StudyOptions | None = None, *, progress: OnRegime | None = None
) -> Study:
    """Studies each of ``sources``: an npz with ``topk`` in the nine regimes, a trace as it was recorded.

    A regime that an npz has too few prompts or tokens for is left out, and ``progress`` says so. Raises DataError,
    ConfigError, BudgetError or OSError.
    """
    chosen = options or StudyOptions()
    heard = progress or (lambda regime, what: None)
    regimes = [
        _regime(name, requests, chosen, heard)
        for source in sources
        for name, requests in _regimes(source, chosen, heard)
    ]
    return Study(
        title="Cache policies by regime",
        regimes=tuple(regimes),
        assumptions=chosen.machine.assumptions,
        source=chosen.machine.source,
        version=__version__,
    )


def half_life_map(
    requests: Requests,
    capacities: Sequence[Capacity],
    *,
    scope: Scope = Scope.GLOBAL,
    contract: Contract = Contract.ATOMIC,
    warmup_steps: int = 0,
    threads: int = 0,
    progress: OnProgress | None = None,
) -> HalfLifeMap:
    """Miss ratios of LFU-decay over half-lives (a step to the trace's length, and never) and capacities."""
    frames = sorted({requests.table.frames_of(capacity) for capacity in capacities})
    tried = half_lives(requests.step_count)
    settings = [
        ReplaySetting(lfu_decay(half_life), size, scope, contract)
        for half_life, size in product(tried, frames)
    ]
    ratios = replay_each(
        requests,
        settings,
        lambda replayed: replayed.outcome.miss_ratio,
        warmup_steps=warmup_steps,
        detail=Detail.STEPS,
        threads=threads,
        progress=progress,
    )
    width = len(frames)
    return HalfLifeMap(
        half_lives=tuple(tried),
        capacity_fractions=tuple(size / requests.table.total_frames for size in frames),
        miss_ratios=tuple(tuple(ratios[at : at + width]) for at in range(0, len(ratios), width)),
    )


def regime_study(
    requests: Requests,
    capacities: Sequence[Capacity],
    *,
    name: str | None = None,
    policies: Sequence[PolicySpec | str] | None = None,
    scope: Scope = Scope.GLOBAL,
    contract: Contract = Contract.ATOMIC,
    warmup_steps: int = 0,
    machine: Machine | None = None,
    tuning: Tuning | None = None,
    found: Sequence[Curve] | None = None,
    half_life: HalfLifeMap | None = None,
    threads: int = 0,
    progress: OnProgress | None = None,
) -> RegimeStudy:
    """A regime of a report: curves with costs and hits over time of ``policies`` (None: all of them).

    ``found``, ``half_life`` and ``tuning`` are taken as they are where they are known already. Raises
    ConfigError or BudgetError.
    """
    drawn = found or curves(
        requests,
        all_policies(requests) if policies is None else policies,
        capacities,
        scope=scope,
        contract=contract,
        warmup_steps=warmup_steps,
        machine=machine or Machine(),
        windows=_WINDOWS,
        threads=threads,
        progress=progress,
    )
    if tuning is None:
        points = drawn[0].points
        middle = points[len(points) // 2].capacity_frames
        regime = survey(requests, middle, contract=contract, threads=threads)
    else:
        regime = tuning.regime
    return RegimeStudy(
        name=name or requests.name,
        trace=requests.info,
        contract=contract_name(requests, contract),
        scope=scope.value,
        active_per_layer=regime.active_records,
        records_per_layer=regime.layer_records,
        curves=tuple(drawn),
        half_lives=half_life,
        tuned=None if tuning is None else tuning.result,
        advice=regime.advice,
    )


def _regimes(source: Path, options: StudyOptions, heard: OnRegime) -> Iterator[tuple[str, Requests]]:
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
            heard(name, "importing")
            try:
                requests = _imported(source, target, name, {**settings, "weight_bytes": options.weight_bytes})
            except DataError as error:  # too few prompts or tokens for this one
                heard(name, f"left out: {error}")
                left_out.append(error)
                continue
            yield name, requests
    if len(left_out) == len(TOPK_REGIMES):
        raise left_out[0]


def _imported(source: Path, target: Path, name: str, settings: Mapping[str, object]) -> Requests:
    """The requests of one regime of an npz. Raises DataError for too few steps of it."""
    import_trace(source, target, kind=SourceKind.NPZ, options=settings)
    requests = load_requests(target, name=f"{source.name}: {name}")
    if requests.step_count < LEAST_STEPS:
        raise DataError(
            f"{source}: {name}: expected at least {LEAST_STEPS} steps, found {requests.step_count}"
        )
    return requests


def _regime(name: str, requests: Requests, options: StudyOptions, heard: OnRegime) -> RegimeStudy:
    everything = TuneOptions(
        contract=options.contract,
        threads=options.threads,
        seed=options.seed,
        hindsight=Hindsight.ALL,
    )
    tunings = {}
    for capacity in options.tuned_at:
        heard(name, f"tuning at {capacity:.0%}")
        tunings[capacity] = tune(requests, capacity, everything, machine=options.machine)
    heard(name, "tuning LFU-decay against LRU")
    alone = replace(
        everything,
        policies=("lfu-decay",),
        scopes=(Scope.GLOBAL,),
        baseline=Candidate(PolicySpec("lru")),
        hindsight=Hindsight.FINALISTS,
    )
    against_lru = tune(requests, options.focus, alone, machine=options.machine)
    heard(name, "half-lives")
    lives = half_life_map(
        requests, options.half_life_capacities, contract=options.contract, threads=options.threads
    )
    heard(name, "curves")
    drawn = regime_study(
        requests,
        options.capacities,
        name=name,
        contract=options.contract,
        machine=options.machine,
        tuning=tunings[options.focus],
        half_life=lives,
        threads=options.threads,
    )
    heard(name, "quotas for layers")
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

    def reduce(replayed: Replayed) -> Outcome:
        return with_costs(requests, replayed, options.machine)

    return tuple(replay_each(requests, settings, reduce, threads=options.threads))
