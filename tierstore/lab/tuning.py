"""Chooses a cache setting on the first part of a trace, and scores it on the rest.

1. A coarse grid (policies, half-lives, scopes) is replayed on the last million requests of the prefix.
2. The best settings get neighbours: half-lives between the grid's, thresholds, a tuned split of the capacity.
3. The best of all of them, and the simplest of those close to the best, are replayed on the whole prefix. The choice is
   the simplest that cannot be told from the best (block bootstrap, corrected for the number of tries) and costs at
   most half a percent more.
4. They are replayed once more on the whole trace; only the steps after the prefix count, and the cache keeps what it
   held (warm). This scores the choice against the default of ``tierstore train``.

A run with prefetches reserves a part of its cache for them, which changes the best setting. So if the trace has the
prefetches of its run, every candidate is replayed once, over the whole trace, as it was recorded
(``replay_recorded``). The choice still sees the prefix alone, since a step's counts do not depend on later steps.
Only the split of the capacity comes from curves without lookahead; it is then scored with it.

Without prefetches the cost of steps 1 and 2 does not depend on the trace's length; steps 3 and 4 take some twenty replays.
``regime_study`` combines a trace's curves and the choice for a report.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierstore._native import Detail, Oversized
from tierstore.cache.config import Scope
from tierstore.errors import BudgetError, ConfigError, DataError
from tierstore.lab.bootstrap import Interval, paired_interval
from tierstore.lab.candidates import (
    Candidate,
    cache_configuration,
    configuration_text,
    default_candidate,
    half_lives,
    layer_curves,
    lfu_decay,
    live_policies,
    neighbours,
    split_capacity,
    starting_grid,
)
from tierstore.lab.costs import Machine, Objective, cost_by_step, with_costs
from tierstore.lab.miss_curves import Regime, curves, survey
from tierstore.lab.requests import Capacity, Requests
from tierstore.lab.results import Curve, HalfLifeMap, Outcome, RegimeStudy, TuneResult, TuneVerdict
from tierstore.lab.simulate import (
    Contract,
    LiveReplay,
    Recording,
    Replayed,
    contract_name,
    replay_each,
    replay_recorded,
    suits,
)
from tierstore.stats import OnProgress

OnStage: TypeAlias = Callable[[str, int, int], None]
"""Called with the stage, the number of finished replays, and that of all replays."""

_COARSE_REQUESTS = 1_000_000
_BEST = 6  # finalists by cost
_SIMPLEST = 4  # finalists by simplicity, of those this close to the best:
_CLOSE = 1.01
_TIED = 1.005  # relative extra cost allowed to a simpler setting that cannot be told from the best
LEAST_STEPS = 4
"""The fewest steps of a trace that can be tuned on and scored."""


class Hindsight(enum.Enum):
    """The settings that the choice is compared with on the rest: the finalists, or all that were tried (slower)."""

    FINALISTS = "finalists"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Options of the search. ``policies`` empty: all that ``tierstore train`` runs and that suit the trace."""

    policies: tuple[str, ...] = ()
    scopes: tuple[Scope, ...] = (Scope.GLOBAL, Scope.LAYER)
    objective: Objective = Objective.MISSES
    contract: Contract = Contract.ATOMIC
    prefix: float = 0.5  # of the steps
    confidence: float = 0.95
    seed: int = 0
    threads: int = 0
    baseline: Candidate | None = None  # None: default_candidate(requests)
    hindsight: Hindsight = Hindsight.FINALISTS

    def __post_init__(self) -> None:
        if not 0 < self.prefix < 1:
            raise ConfigError(f"prefix: expected a fraction of the steps in (0, 1), got {self.prefix}")
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence: expected a number in (0, 1), got {self.confidence}")
        if not self.scopes:
            raise ConfigError("scopes: expected at least one")


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuned choice, the regime, and the held-out outcomes compared with it, best first."""

    result: TuneResult
    regime: Regime
    chosen: Candidate
    ranked: tuple[tuple[Candidate, Outcome], ...]


def tune(
    requests: Requests,
    capacity: Capacity,
    options: TuneOptions | None = None,
    *,
    machine: Machine | None = None,
    recording: Recording | None = None,
    progress: OnStage | None = None,
) -> Tuning:
    """The setting for ``capacity``, chosen on the first part of the steps and scored on the rest.

    Stalls are estimated from ``machine``. With ``recording`` (``recording_of``) candidates are scored with its
    prefetches; without, and for stalls or the sequential contract, without lookahead. Raises ConfigError, BudgetError
    (a capacity that does not hold the largest record of a live store), or DataError for a trace of fewer than four steps.

    A trace of device slots is tuned for the fewest copies, in one scope: what the run's steps made stale is copied again
    only in a replay of the ``recording``.
    """
    options = options or TuneOptions()
    if requests.header.of_slots:  # they have one scope, and their misses are copies of one size
        options = replace(
            options, scopes=(Scope.GLOBAL,), objective=Objective.MISSES, contract=Contract.ATOMIC
        )
    if requests.step_count < LEAST_STEPS:
        raise DataError(
            f"{requests.name}: expected at least {LEAST_STEPS} steps to tune on and to score, found "
            f"{requests.step_count}"
        )
    if requests.table.pins:
        raise ConfigError(
            f"{requests.name}: {requests.table.pins}: a live cache cannot pin records, so pins cannot be tuned"
        )
    capacity_frames = requests.table.frames_of(capacity)
    if requests.oversized is Oversized.REFUSE and capacity_frames < requests.table.largest_record_frames:
        raise BudgetError(
            f"capacity: {capacity_frames} frames are too small: the largest record takes "
            f"{requests.table.largest_record_frames} with all of its groups"
        )
    tuner = _Tuner(requests, capacity_frames, options, machine or Machine(), progress)
    prefix = requests.between(0, tuner.split)
    regime = survey(prefix, capacity_frames, contract=options.contract, threads=options.threads)
    if recording is None or options.contract is not Contract.ATOMIC or options.objective is Objective.STALL:
        chosen, held_out = tuner.without_lookahead(prefix)
    else:
        chosen, held_out = tuner.with_prefetches(prefix, recording)
    return tuner.result(regime, chosen, held_out)


@dataclass(frozen=True, slots=True)
class _Scored:
    """A candidate with its requests and cost by step, 0 in warm-up steps, and its outcome."""

    candidate: Candidate
    step_requests: NDArray[np.uint64] | NDArray[np.int64]
    costs: NDArray[np.float64]
    outcome: Outcome

    @property
    def total(self) -> float:
        return float(self.costs.sum())


_Score: TypeAlias = Callable[[Sequence[Candidate], str], list[_Scored]]
"""Scores candidates on the search's requests; the text names the stage."""


class _Tuner:
    """One search."""

    def __init__(
        self,
        requests: Requests,
        capacity_frames: int,
        options: TuneOptions,
        machine: Machine,
        progress: OnStage | None,
    ) -> None:
        self._requests = requests
        self._capacity = capacity_frames
        self._options = options
        self._baseline = options.baseline or default_candidate(requests)
        self._machine = machine
        self._progress = progress
        #: Steps of the prefix.
        self.split = min(max(2, round(requests.step_count * options.prefix)), requests.step_count - 2)

    def without_lookahead(self, prefix: Requests) -> tuple[Candidate, list[_Scored]]:
        """The choice, and the candidates that it is compared with, scored on the rest."""
        part = prefix.tail(_COARSE_REQUESTS)

        def score(candidates: Sequence[Candidate], stage: str) -> list[_Scored]:
            return self._replay(part, candidates, stage, part.step_count // 4)

        finalists, tried = self._search(part, score)
        scored = self._replay(prefix, finalists, "prefix", prefix.step_count // 8)
        chosen = self._choose(scored)
        # The choice is made without the held-out rest.
        rest = tried if self._options.hindsight is Hindsight.ALL else finalists
        return chosen, self._replay(self._requests, rest, "rest", self.split)

    def with_prefetches(self, prefix: Requests, recording: Recording) -> tuple[Candidate, list[_Scored]]:
        """The search with the recorded prefetches; a candidate that does not fit beside them is dropped."""
        options = self._options
        replays: dict[tuple[object, ...], LiveReplay] = {}
        seen = slice(self.split // 8, self.split)  # the prefix without the steps that fill the cache

        def score(candidates: Sequence[Candidate], stage: str) -> list[_Scored]:
            fresh = [one for one in candidates if one.key not in replays]
            settings = [one.setting(self._capacity, options.contract) for one in fresh]
            found = replay_recorded(
                self._requests,
                recording,
                settings,
                threads=options.threads,
                progress=self._progress_of(stage),
            )
            for one, replayed in zip(fresh, found, strict=True):
                if replayed is not None:
                    replays[one.key] = replayed
            fitting = [one for one in candidates if one.key in replays]
            return [self._scored_live(one, replays[one.key], seen) for one in fitting]

        if not score([self._baseline], "baseline"):
            raise BudgetError(
                f"capacity: {self._capacity} frames, of which prefetches hold "
                f"{recording.lookahead_at(self._capacity)} as in the recorded run, are too small for an access"
            )
        finalists, tried = self._search(prefix.tail(_COARSE_REQUESTS), score)
        chosen = self._choose([self._scored_live(one, replays[one.key], seen) for one in finalists])
        rest = tried if options.hindsight is Hindsight.ALL else finalists
        return chosen, [self._scored_live(one, replays[one.key], slice(self.split, None)) for one in rest]

    def _scored_live(self, candidate: Candidate, replayed: LiveReplay, steps: slice) -> _Scored:
        if self._options.objective is Objective.MISSES:
            costs = replayed.step_misses.astype(np.float64)
        else:
            costs = (replayed.column("read_bytes") + replayed.column("written_bytes")).astype(np.float64)
        full = replayed.outcome(self._requests, steps)
        return _Scored(candidate, replayed.step_requests[steps], costs[steps], full)

    def _search(self, part: Requests, score: _Score) -> tuple[list[Candidate], list[Candidate]]:
        """The finalists, the baseline among them, and all candidates that have a score."""
        options = self._options
        names = options.policies or [name for name in live_policies() if suits(self._requests, name)]
        grid = starting_grid(self._requests, self._capacity, names, options.scopes)
        tried = score(_distinct([self._baseline, *grid]), "grid")
        finer = [
            near
            for scope in options.scopes
            for name in names
            for best in _best_of(tried, scope, name)
            for near in neighbours(best.candidate)
        ]
        for best in _best_of(tried, Scope.LAYER):
            curves = layer_curves(
                part,
                best.candidate.policy,
                objective=options.objective,
                machine=self._machine,
                contract=options.contract,
                warmup_steps=part.step_count // 4,
                threads=options.threads,
            )
            quotas = split_capacity(part, curves, self._capacity)
            finer.append(Candidate(best.candidate.policy, Scope.LAYER, quotas))
        known = {one.candidate.key for one in tried}
        fresh = [one for one in _distinct(finer) if one.key not in known]
        tried += score(fresh, "neighbours")
        ranked = sorted(tried, key=lambda one: (one.total, one.candidate.complexity))
        close = [one for one in ranked if one.total <= _CLOSE * ranked[0].total]
        close.sort(key=lambda one: one.candidate.complexity)
        finalists = [one.candidate for one in (*ranked[:_BEST], *close[:_SIMPLEST])]
        return _distinct([self._baseline, *finalists]), [one.candidate for one in ranked]

    def _replay(
        self, requests: Requests, candidates: Sequence[Candidate], stage: str, warmup_steps: int
    ) -> list[_Scored]:
        """Replays without lookahead; machine costs are computed only on the rest, where they are shown."""
        options, machine = self._options, self._machine
        held_out = requests is self._requests

        def reduce(replayed: Replayed) -> tuple[NDArray[np.uint64], NDArray[np.float64], Outcome]:
            costs = cost_by_step(requests, replayed, options.objective, machine)
            outcome = with_costs(requests, replayed, machine) if held_out else replayed.outcome
            return replayed.step_requests, costs, outcome

        replays = replay_each(
            requests,
            [one.setting(self._capacity, options.contract) for one in candidates],
            reduce,
            warmup_steps=warmup_steps,
            detail=Detail.STEPS if options.objective is Objective.MISSES and not held_out else Detail.EVENTS,
            threads=options.threads,
            progress=self._progress_of(stage),
        )
        return [_Scored(candidate, *found) for candidate, found in zip(candidates, replays, strict=True)]

    def _progress_of(self, stage: str) -> OnProgress | None:
        notify = self._progress
        return None if notify is None else lambda done, total: notify(stage, done, total)

    def _interval(self, one: _Scored, other: _Scored, confidence: float) -> Interval:
        """The additional cost of ``one`` over ``other``: per request for misses, per step otherwise."""
        counted = np.flatnonzero(one.step_requests)
        weights = one.step_requests[counted].astype(np.float64)
        if self._options.objective is not Objective.MISSES:
            weights = np.ones(len(counted))
        difference = (one.costs - other.costs)[counted]
        return paired_interval(difference, weights, confidence=confidence, seed=self._options.seed)

    def _choose(self, scored: Sequence[_Scored]) -> Candidate:
        """The simplest candidate that cannot be told from the best on the prefix."""
        best = min(scored, key=lambda one: (one.total, one.candidate.complexity))
        confidence = 1 - (1 - self._options.confidence) / len(scored)
        for one in sorted(scored, key=lambda one: one.candidate.complexity):
            near = one.total <= _TIED * best.total
            if one is best or (near and self._interval(one, best, confidence).holds_zero):
                return one.candidate
        raise AssertionError("the best is one of them")

    def result(self, regime: Regime, chosen: Candidate, held_out: list[_Scored]) -> Tuning:
        options = self._options
        by_key = {one.candidate.key: one for one in held_out}
        winner, baseline = by_key[chosen.key], by_key[self._baseline.key]
        gain = self._interval(baseline, winner, options.confidence)
        verdict = (
            TuneVerdict.BETTER if gain.low > 0 else TuneVerdict.WORSE if gain.high < 0 else TuneVerdict.TIE
        )
        ranked = sorted(held_out, key=lambda one: (one.total, one.candidate.complexity))
        outcomes = {one.candidate.key: one.outcome for one in ranked}
        recommended = self._baseline if verdict is TuneVerdict.WORSE else chosen
        config = cache_configuration(recommended)
        lookahead = outcomes[chosen.key].lookahead_frames
        result = TuneResult(
            chosen=outcomes[chosen.key],
            baseline=outcomes[self._baseline.key],
            best=outcomes[ranked[0].candidate.key],
            gain=gain.estimate,
            gain_low=gain.low,
            gain_high=gain.high,
            confidence=gain.confidence,
            verdict=verdict,
            tuned_steps=self.split,
            advice=regime.advice,
            configuration=configuration_text(self._requests, recommended, self._capacity),
            objective=options.objective.value,
            hindsight=options.hindsight.value,
            warning=None if config is None else config.starvation_warning,
            scored=f"the recorded prefetches and a lookahead of {lookahead} frames"
            if lookahead
            else "no lookahead",
        )
        held = tuple((one.candidate, outcomes[one.candidate.key]) for one in ranked)
        return Tuning(result, regime, chosen, held)


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """``candidates`` without equivalents of earlier ones."""
    return list({one.key: one for one in reversed(list(candidates))}.values())[::-1]


def _best_of(scored: Sequence[_Scored], scope: Scope, policy: str | None = None) -> list[_Scored]:
    """The cheapest candidate of a scope (and policy): a list of one, or empty."""
    among = [
        one
        for one in scored
        if one.candidate.scope is scope and (policy is None or one.candidate.policy.name == policy)
    ]
    return sorted(among, key=lambda one: (one.total, one.candidate.complexity))[:1]


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
    """Miss ratios of LFU-decay over half-lives and capacities. Half-lives: one step to the trace's length, and infinity."""
    tried = half_lives(requests.step_count)
    found = curves(
        requests,
        [lfu_decay(half_life) for half_life in tried],
        capacities,
        scope=scope,
        contract=contract,
        warmup_steps=warmup_steps,
        threads=threads,
        progress=progress,
    )
    return HalfLifeMap(
        half_lives=tuple(tried),
        capacity_fractions=tuple(point.capacity_fraction for point in found[0].points),
        miss_ratios=tuple(tuple(point.miss_ratio for point in curve.points) for curve in found),
    )


def regime_study(
    requests: Requests,
    drawn: Sequence[Curve],
    *,
    name: str | None = None,
    scope: Scope = Scope.GLOBAL,
    contract: Contract = Contract.ATOMIC,
    tuning: Tuning | None = None,
    half_life: HalfLifeMap | None = None,
    threads: int = 0,
) -> RegimeStudy:
    """One trace in a report: its curves ``drawn``, the tuner's choice, and LFU-decay over half-lives.

    The curves should have windows (``REPORT_WINDOWS``) and the costs of a machine.
    """
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
