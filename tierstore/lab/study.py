"""A regime of a report: a trace's curves over capacity, LFU-decay over half-lives, the tuner's choice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from tierstore._native import Detail
from tierstore.cache.config import Scope
from tierstore.lab.candidates import half_lives, lfu_decay
from tierstore.lab.costs import Machine
from tierstore.lab.miss_curves import all_policies, curves, survey
from tierstore.lab.requests import Capacity, Requests
from tierstore.lab.results import Curve, HalfLifeMap, RegimeStudy
from tierstore.lab.simulate import Contract, OnProgress, PolicySpec, ReplaySetting, contract_name, replay_each
from tierstore.lab.tuning import Tuning

_WINDOWS = 50


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
