"""Whether tuning a policy is worth anything, before any is tuned.

Where a pass asks for most of a layer's records, every sensible policy keeps a part and misses the rest: the
miss ratio is close to 1 - C/N and to the clairvoyant choice. (On real routing of 64 experts a layer that is so
from about 512 tokens a step.) There the time is won with fewer bytes written back, earlier fetches, or more
memory. It is measured here, not assumed: sensible policies and Belady's choice are replayed on a part of the trace.
Where that is no bound (``ReplaySetting.role``), it does not say what a policy may gain.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from tierstore._native import Detail
from tierstore.lab.requests import Requests
from tierstore.lab.results import Role
from tierstore.lab.simulate import Contract, PolicySpec, ReplaySetting, replay_each

#: In the order of preference among equals.
SENSIBLE = ("lru", "lfu-decay")
_AT_BOUND = 1e-3  # of miss ratio: a policy this close to the bound has nothing left to gain
_MOST_REQUESTS = 2_000_000


class Worth(enum.Enum):
    """What there is to gain from a better policy."""

    FITS = "fits"  # nothing is ever evicted
    AT_BOUND = "at bound"  # every sensible policy is
    CHOICE = "choice"  # a sensible policy is, but not every one
    TUNE = "tune"  # the best of them is above the bound, or no bound is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Active against capacity (frames), and simulated miss ratios of a part of the trace."""

    active_frames: float  # that one event asks for, the mean
    layer_frames: float  # of a layer's entries, the mean
    capacity_frames: float  # for each layer, if all had the same
    active_records: float
    layer_records: float
    miss_ratios: dict[str, float]  # of the sensible policies
    bound: float  # Belady's, which ``role`` says whether it is one
    role: Role
    worth: Worth

    @property
    def advice(self) -> str:
        """What to do, in a sentence or two."""
        asked = (
            f"A pass asks for {self.active_frames:.1f} of a layer's {self.layer_frames:.1f} frames, "
            f"{self.capacity_frames:.1f} fit"
        )
        if self.worth is Worth.FITS:
            return f"{asked}: everything fits, and no policy has anything to choose."
        best = min(self.miss_ratios, key=lambda name: self.miss_ratios[name])
        worst = max(self.miss_ratios, key=lambda name: self.miss_ratios[name])
        said = f"{asked}; misses: {self.role.value} {self.bound:.4f}, " + ", ".join(
            f"{name} {ratio:.4f}" for name, ratio in self.miss_ratios.items()
        )
        if self.worth is Worth.AT_BOUND:
            return (
                f"{said}. Tuning is not worth anything here: every sensible policy is within {_AT_BOUND:g} of "
                "the bound. Write-back, prefetch or memory is where the gain is."
            )
        if self.worth is Worth.CHOICE:
            return f"{said}. Choose {best} over {worst}; beyond that there is nothing to tune."
        if self.role is not Role.BOUND:
            return (
                f"{said}. Tuning may be worth it: the clairvoyant choice is no bound here (entries differ in size, or an "
                "access is split), so what a policy may gain is not known."
            )
        gap = self.miss_ratios[best] - self.bound
        return (
            f"{said}. Tuning may be worth it: at most {gap:.4f} of the requests "
            f"({gap / self.miss_ratios[best]:.0%} of the misses) lie between {best} and the bound."
        )


def survey(
    requests: Requests, capacity_frames: int, *, contract: Contract = Contract.ATOMIC, threads: int = 0
) -> Regime:
    """What ``requests`` are like at ``capacity_frames`` (global scope), from at most two million of them.

    Raises BudgetError for a capacity that an entry does not fit.
    """
    part = requests.head(_MOST_REQUESTS)
    settings = [
        ReplaySetting(PolicySpec(name), capacity_frames, contract=contract) for name in (*SENSIBLE, "belady")
    ]
    role = settings[-1].role(part)
    *found, bound = replay_each(
        part,
        settings,
        lambda replayed: replayed.miss_ratio,
        warmup_steps=part.step_count // 4,
        detail=Detail.STEPS,
        threads=threads,
    )
    ratios = dict(zip(SENSIBLE, found, strict=True))
    layers = max(len(requests.table.present_layers), 1)
    info = requests.info
    return Regime(
        active_frames=float(requests.table.frames[part.entries].sum(dtype=np.uint64)) / part.events,
        layer_frames=requests.table.total_frames / layers,
        capacity_frames=capacity_frames / layers,
        active_records=part.records_per_event,
        layer_records=info.records / layers,
        miss_ratios=ratios,
        bound=bound,
        role=role,
        worth=_worth(requests, capacity_frames, ratios, bound if role is Role.BOUND else 0.0),
    )


def _worth(requests: Requests, capacity_frames: int, ratios: dict[str, float], bound: float) -> Worth:
    if capacity_frames >= requests.table.total_frames:
        return Worth.FITS
    if max(ratios.values()) - bound <= _AT_BOUND:
        return Worth.AT_BOUND
    return Worth.CHOICE if min(ratios.values()) - bound <= _AT_BOUND else Worth.TUNE
