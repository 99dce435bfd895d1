"""Bytes that a step reads from and writes to disk, by asking the residency core itself.

The accesses of a training step are known but for which experts the router chooses. So the very core that a run would have,
with its policy, budget and lookahead, is driven through the run's own access program for some steps, and what it reads and
writes is counted. With as many tokens as leave no expert without one, which is the common
case, nothing is assumed. With fewer, experts are drawn with the probability that uniform routing gives each,
``1 - (1 - K / E) ** T``, from a fixed seed, and the figure is marked so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore._native import CapacityError, Decision, Residency
from tierstore.cache.access import GROUP_STRIDE, Need, Phase
from tierstore.cache.frames import frames_of
from tierstore.errors import BudgetError
from tierstore.model.config import CheckpointActivations
from tierstore.plan.capacity import Capacity, Setting
from tierstore.plan.evidence import Evidence
from tierstore.prefetch.plan import StepTiming, group_order
from tierstore.prefetch.predictor import make_predictor
from tierstore.prefetch.program import Access, AccessProgram, Action, Experts, Speculation
from tierstore.prefetch.schedule import Schedule
from tierstore.store.adamw import Inactive
from tierstore.store.config import StoreConfig
from tierstore.store.format import Group
from tierstore.store.opening import make_residency, record_frame_bytes


@dataclass(frozen=True)
class StepWindow:
    """Which steps of a run count: ``steps`` of them, after ``warm_up``."""

    warm_up: int = 6
    steps: int = 8


#: An expert that is reached with at least this probability is taken to be reached.
_CERTAIN = 1 - 1e-6

_Decided = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]


@dataclass(frozen=True)
class Moved:
    """Bytes read that an expert's load waits for, bytes read that only its step does (in a backward pass, all but the
    weights: moments, spilled gradients), and bytes of what was evicted to disk for them.
    """

    loaded: int = 0
    state: int = 0
    written: int = 0

    @property
    def read(self) -> int:
        return self.loaded + self.state

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.loaded + other.loaded, self.state + other.state, self.written + other.written)

    def __floordiv__(self, parts: int) -> Moved:
        return Moved(self.loaded // parts, self.state // parts, self.written // parts)


@dataclass(frozen=True)
class Traffic:
    """Means of one step of one rank, in its steady state. ``moved_for`` divides the bytes by the phase and the layer that
    they were read for, or evicted for; ``active`` is the share of its experts that a pass reaches.
    """

    read_bytes: int
    written_bytes: int
    moved_for: Mapping[tuple[Phase, int], Moved]
    hits: float
    misses: float
    active: float
    evidence: Evidence


def step_traffic(setting: Setting, taken: Capacity, span: StepWindow | None = None) -> Traffic:
    """Bytes of a step under the budgets of ``taken``, a mean over ``span``. Commits are not counted.

    Raises BudgetError.
    """
    try:
        return _Drive(setting, taken).run(span or StepWindow())
    except CapacityError as error:
        raise BudgetError(f"host_budget: {error}") from error


class CountedSteps:
    """``StepCounts`` of experts that exist only as numbers; ``done`` takes each access."""

    def __init__(self, layers: Sequence[int], experts: int, *, replays: bool) -> None:
        self.applied = 0
        self.replays = replays
        self._steps = {layer: np.zeros(experts, np.int64) for layer in layers}

    def of(self, layer: int, experts: Experts) -> npt.NDArray[np.int64]:
        return self._steps[layer][experts]

    def done(self, access: Access, requests: npt.NDArray[np.uint32]) -> None:
        experts, actions = access.experts[requests], access.actions[requests]
        self._steps[access.layer][experts[actions & Action.CATCH_UP != 0]] = self.applied
        self._steps[access.layer][experts[actions & Action.STEP != 0]] = access.step


class _Drive:
    """The trainer's accesses, in its order."""

    def __init__(self, setting: Setting, taken: Capacity) -> None:
        self._setting = setting
        config, model = setting.config, setting.model
        self._layers = model.moe_layers
        self._index = {layer: index for index, layer in enumerate(self._layers)}
        self._local = setting.local_experts
        tokens = setting.tokens * setting.ranks.sharing
        reached = 1 - (1 - model.top_k / model.experts) ** tokens
        self._reached = 1.0 if reached >= _CERTAIN else reached
        self._random = np.random.default_rng(0)
        self._group_bytes = np.array([setting.schema.layout(group).slot_bytes for group in Group], np.int64)
        self._residency = self._make(taken)
        replays = config.adamw.inactive is Inactive.EXACT
        self._counts = CountedSteps(self._layers, self._local, replays=replays)
        self._program = AccessProgram(
            Schedule.of_layers(self._layers, depth=config.prefetch.depth),
            make_predictor(config.prefetch.predictor, range(self._local), most=config.prefetch.guesses),
            self._counts,
            timing=config.step_timing,
            experts=self._local,
        )
        self._moved_for: defaultdict[tuple[Phase, int], Moved] = defaultdict(Moved)

    def _make(self, taken: Capacity) -> Residency:
        setting, schema = self._setting, self._setting.schema
        frame = record_frame_bytes([schema])
        store = StoreConfig(
            host_budget=taken.divided.cache,
            lookahead=taken.divided.lookahead,
            layers=self._layers,
            cache=setting.config.cache,
            group_order=group_order(setting.ranks.count // setting.ranks.sharing),
        )
        residency = make_residency(store, max(taken.divided.cache // frame, 1), frame)
        layouts = [schema.layout(group) for group in Group]
        frames = [frames_of([section.nbytes for section in one.sections], frame) for one in layouts]
        sizes = [one.slot_bytes for one in layouts]
        for layer in self._layers:
            for _ in range(self._local):
                residency.add_record(layer, frames, sizes, 0)
        return residency

    def _register(self) -> None:
        """Fills every record, one access each, and commits: what this leaves in the cache can show for ever."""
        flags, no_action = np.array([Need.STEP], np.uint16), np.zeros(1, np.uint8)
        for layer in self._layers:
            for expert in range(self._local):
                one = np.array([expert], np.uint32)
                self._carry_out([Access(Phase.INIT, layer, one, flags, no_action, step=0)])
        self._residency.clean()

    def run(self, span: StepWindow) -> Traffic:
        self._register()
        for step in range(span.warm_up):
            self._step(step)
        before = self._residency.stats()
        self._moved_for.clear()
        for step in range(span.warm_up, span.warm_up + span.steps):
            self._step(step)
        after = self._residency.stats()

        def mean(name: str) -> float:
            return float(getattr(after, name) - getattr(before, name)) / span.steps

        return Traffic(
            read_bytes=round(mean("read_bytes")),
            written_bytes=round(mean("written_bytes")),
            moved_for={what: moved // span.steps for what, moved in self._moved_for.items()},
            hits=mean("hits"),
            misses=mean("misses"),
            active=self._reached,
            evidence=Evidence.FORMULA if self._reached == 1.0 else Evidence.ASSUMED,
        )

    # One step ----------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        config, micros = self._setting.config, self._setting.config.data.micro_batches
        recomputes = config.model.checkpoint_activations is CheckpointActivations.BLOCK
        for micro in range(micros):
            self._program.begin_micro(index=micro, count=micros)
            used = {layer: self._draw() for layer in self._layers}
            for layer in self._layers:
                self._carry_out(self._program.forward(layer, used[layer]))
            for layer in reversed(self._layers):
                if recomputes:
                    self._carry_out(self._program.forward(layer, used[layer]))
                self._carry_out(self._program.backward(layer, used[layer]))
        every = config.cache.write_back_every
        if every and (step + 1) % every == 0:
            # Of a simulated step they hold up the next reads, though nothing in a run waits for them: no better is known.
            self._charge(Phase.FORWARD, self._layers[0], self._residency.clean())
        if config.step_timing is StepTiming.DEFERRED:
            self._program.apply()
        self._counts.applied += 1
        self._residency.end_step()

    def _draw(self) -> Experts:
        if self._reached == 1.0:
            return np.arange(self._local, dtype=np.uint32)
        return np.flatnonzero(self._random.random(self._local) < self._reached).astype(np.uint32)

    # The residency core ------------------------------------------------------------------------------------

    def _carry_out(self, accesses: Iterable[Access]) -> None:
        for access in accesses:
            phase, layer = access.phase, access.layer
            numbers = self._numbers(layer, access.experts)
            groups, _ = self._residency.begin_access(phase, layer, numbers, access.flags)
            for group in range(groups):
                requests, demanded, following = self._residency.next_group()
                self._charge(phase, layer, demanded)
                self._charge(phase, layer, following)
                if group == groups - 1:
                    self._program.speculate(access, self._prefetch)
                self._residency.end_group()
                self._counts.done(access, requests)
                self._program.done(access, requests)

    def _prefetch(self, ahead: Speculation) -> int:
        numbers = self._numbers(ahead.layer, ahead.experts)
        taken, decided = self._residency.prefetch(ahead.phase, ahead.layer, numbers, ahead.flags)
        self._charge(ahead.phase, ahead.layer, decided)
        return taken

    def _numbers(self, layer: int, experts: Experts) -> Experts:
        return (experts + self._index[layer] * self._local).astype(np.uint32)

    def _charge(self, phase: Phase, layer: int, decided: _Decided) -> None:
        kinds, entries = decided
        groups = entries % GROUP_STRIDE
        nbytes = self._group_bytes[groups]
        fetched = kinds == Decision.FETCH
        written = (kinds == Decision.EVICT_WRITE) | (kinds == Decision.WRITE_BACK)
        state = fetched & (groups != Group.WEIGHTS) & (phase is Phase.BACKWARD)
        self._moved_for[phase, layer] += Moved(
            int(nbytes[fetched & ~state].sum()), int(nbytes[state].sum()), int(nbytes[written].sum())
        )
