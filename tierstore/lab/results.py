"""The lab's results: plain values that commands print, studies compare and the report draws.

::

    Study                 one report: its source and its regimes
    └── RegimeStudy       one trace under one replay contract and scope
        ├── TraceInfo     the replayed trace, by hash
        ├── Curve         one policy (or clairvoyant choice) over capacities
        │   └── Outcome   one replay: counts, traffic, costs, by layer, over time
        ├── HalfLifeMap   miss ratios of LFU-decay over half-life and capacity
        └── TuneResult    a choice on a prefix, scored on the rest

Counts of a replay are ``Outcome.evidence`` (simulated, or measured in a live run). A policy's own time is
always measured; stalls, drive writes and drive life always come from a model and are estimated.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.units import format_bytes, format_seconds


class OutcomeEvidence(enum.Enum):
    """Where a number comes from."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    ESTIMATED = "estimated"


class Role(enum.Enum):
    """A policy that could run, or a clairvoyant choice, which is a bound if no policy can miss less."""

    POLICY = "policy"
    BOUND = "bound"
    CLAIRVOYANT = (
        "clairvoyant"  # with entries of several sizes, or sets that are split: policies may miss less
    )


class TuneVerdict(enum.Enum):
    """Whether tuning beat its baseline on the held-out rest; a tie if the interval contains zero."""

    BETTER = "better"
    TIE = "tie"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class LayerOutcome:
    """One layer's part of an outcome."""

    layer: int
    requests: int
    misses: int


@dataclass(frozen=True, slots=True)
class ReplayWindow:
    """Counts over consecutive steps, from ``first_step`` up to the next window's."""

    first_step: int
    requests: int
    hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay. Capacities in frames (records, where all are equal), sizes in bytes, times in seconds.

    ``requests`` is ``hits + misses + creates``: a created entry had no backing copy and was not read. With a
    lookahead, ``misses`` are all reads, ahead or on demand. Details that a replay lacks are None or empty.
    """

    policy: str
    policy_options: Mapping[str, float | str] = field(default_factory=dict)
    role: Role = Role.POLICY
    capacity_frames: int
    capacity_fraction: float  # of the frames of all entries that the trace requests
    scope: str  # "global" or "layer"
    contract: str  # "event-atomic" or "sequential", and what is pinned
    lookahead_frames: int = 0  # that the recorded prefetches may hold; 0: replayed without prefetch
    steps: int
    requests: int
    hits: int
    misses: int
    creates: int = 0
    evictions: int = 0
    starved: int = 0  # evictions for which the policy had no victim and the fallback chose one
    not_admitted: int = 0  # requests that did not hit, for entries larger than the cache
    write_backs: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evidence: OutcomeEvidence = OutcomeEvidence.SIMULATED
    policy_s: float | None = None  # the policy's and the core's own time, measured
    stall_s_per_step: float | None = None  # estimated
    drive_writes_per_day: float | None = None  # estimated; the whole drive once a day is 1
    drive_life_years: float | None = None  # estimated
    layers: tuple[LayerOutcome, ...] = ()
    windows: tuple[ReplayWindow, ...] = ()

    @property
    def miss_ratio(self) -> float:
        """Misses of all requests; 0 without any."""
        return self.misses / self.requests if self.requests else 0.0

    @property
    def read_per_step(self) -> float:
        return self.read_bytes / max(self.steps, 1)

    @property
    def written_per_step(self) -> float:
        return self.written_bytes / max(self.steps, 1)

    @property
    def label(self) -> str:
        """The policy with its options: ``lfu-decay(half_life=8)``."""
        if not self.policy_options:
            return self.policy
        shown = ", ".join(f"{key}={_plain(value)}" for key, value in sorted(self.policy_options.items()))
        return f"{self.policy}({shown})"


def marked(label: str, role: Role) -> str:
    """``label``, with the role of a clairvoyant choice: ``belady (bound)``."""
    return label if role is Role.POLICY else f"{label} ({role.value})"


def _plain(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, int | float) else value


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy over capacities, ascending."""

    points: tuple[Outcome, ...]

    def __post_init__(self) -> None:
        capacities = [point.capacity_frames for point in self.points]
        if not capacities or capacities != sorted(set(capacities)):
            raise ValueError(f"a curve needs outcomes of ascending capacities, got {capacities}")

    @property
    def policy(self) -> str:
        return self.points[0].policy

    @property
    def label(self) -> str:
        """The policy, with its options if they are the same at all capacities."""
        labels = {point.label for point in self.points}
        return labels.pop() if len(labels) == 1 else self.policy

    @property
    def role(self) -> Role:
        """The curve's role: a bound only if it is one at all capacities."""
        roles = {point.role for point in self.points}
        return roles.pop() if len(roles) == 1 else Role.CLAIRVOYANT


@dataclass(frozen=True, slots=True)
class HalfLifeMap:
    """Miss ratios of LFU-decay: ``miss_ratios[i][j]`` at ``half_lives[i]`` (steps), ``capacity_fractions[j]``."""

    half_lives: tuple[float, ...]
    capacity_fractions: tuple[float, ...]
    miss_ratios: tuple[tuple[float, ...], ...]
    evidence: OutcomeEvidence = OutcomeEvidence.SIMULATED


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """A configuration chosen on a prefix of the trace. All outcomes are of the held-out rest.

    ``gain`` is the baseline's cost less the chosen one's, with a block-bootstrap interval over steps: a miss
    ratio, or with another objective bytes or stalled seconds a step.
    """

    chosen: Outcome
    baseline: Outcome
    best: Outcome  # the best in hindsight
    gain: float
    gain_low: float
    gain_high: float
    confidence: float  # of the interval, such as 0.95
    verdict: TuneVerdict
    tuned_steps: int
    advice: str  # a sentence on whether tuning can gain anything in this regime
    configuration: str  # to paste into a configuration of ``tierstore train``
    objective: str = "misses"  # or "bytes" (read and written), or "stall"
    hindsight: str = (
        "finalists"  # the candidates among which ``best`` is the best: "finalists", or "all" that were tried
    )
    warning: str | None = None  # what the configuration may do to a full cache
    scored: str = "no lookahead"  # or with the recorded prefetches, and how many frames they may hold

    @property
    def best_of(self) -> str:
        """A description of ``best``."""
        return f"the best {'tried' if self.hindsight == 'all' else 'of the finalists'} in hindsight"

    @property
    def gain_text(self) -> str:
        """The gain and its interval, with their unit."""
        if math.isinf(self.gain_low) or math.isinf(self.gain_high):
            interval = "no interval: too few independent steps"
        else:
            ends = f"{self._gained(self.gain_low)} to {self._gained(self.gain_high)}"
            interval = f"{self.confidence:.0%} interval {ends}"
        of = "of the requests" if self.objective == "misses" else "a step"
        return f"{self._gained(self.gain)} {of}, {interval}"

    def _gained(self, value: float) -> str:
        sign, size = "-" if value < 0 else "+", abs(value)
        if self.objective == "bytes":
            return sign + format_bytes(size)
        return sign + (format_seconds(size) if self.objective == "stall" else f"{size:.4f}")

    @property
    def gain_evidence(self) -> OutcomeEvidence:
        """The evidence of the gain, the verdict and the regret."""
        return OutcomeEvidence.ESTIMATED if self.objective == "stall" else self.chosen.evidence

    @property
    def regret(self) -> float:
        """How much worse than the best in hindsight, as a fraction of the best's cost."""
        best, chosen = self.cost(self.best), self.cost(self.chosen)
        if best == 0:
            return 0.0 if chosen == 0 else float("inf")
        return chosen / best - 1.0

    def cost(self, outcome: Outcome) -> float:
        """The objective's cost of ``outcome``, over all of its steps (stall: per step)."""
        if self.objective == "bytes":
            return float(outcome.read_bytes + outcome.written_bytes)
        if self.objective == "stall":
            return outcome.stall_s_per_step or 0.0
        return float(outcome.misses)


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """The replayed trace. ``sha256`` is the hash of its content (see docs/TRACES.md), whatever its file."""

    name: str
    sha256: str
    steps: int
    events: int
    requests: int
    records: int
    layers: int
    total_frames: int  # of all entries that the trace requests
    total_bytes: int
    clock: str = "steps"  # the policy's notion of a step in the run, see docs/TRACES.md


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeStudy:
    """One trace under one contract and scope."""

    name: str
    trace: TraceInfo
    contract: str
    scope: str
    active_per_layer: float  # mean number of records that one access requests
    records_per_layer: float
    curves: tuple[Curve, ...]
    half_lives: HalfLifeMap | None = None
    tuned: TuneResult | None = None
    elsewhere: tuple[TuneResult, ...] = ()  # at other capacities
    against_lru: TuneResult | None = None  # LFU-decay alone, tuned, with LRU as the baseline
    layered: tuple[Outcome, ...] = ()  # at the focus, with a quota for each layer (``curves`` being global)
    advice: str = ""
    focus: float = (
        0.4  # capacity (fraction) of the tables and charts that show one; the nearest on the curves
    )

    @property
    def tunings(self) -> list[TuneResult]:
        """The tuner's choices, at the focus first."""
        return [*([] if self.tuned is None else [self.tuned]), *self.elsewhere]

    def focused(self) -> tuple[Outcome, ...]:
        """Each curve's outcome at the capacity nearest to the focus."""
        return tuple(
            min(curve.points, key=lambda point: abs(point.capacity_fraction - self.focus))
            for curve in self.curves
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The content of one report. ``assumptions`` of the estimates: bandwidth, endurance; ``source`` states in a few words
    whether they were measured, given or assumed.
    """

    title: str
    regimes: tuple[RegimeStudy, ...]
    assumptions: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    version: str = ""
