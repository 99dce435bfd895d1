"""Bytes that a step reads from and writes to disk, by asking the residency core itself.

The accesses of a training step are known but for which experts the router chooses. So the very core that a run would have,
with its policy, budget and lookahead, is driven through the accesses of some steps in the order in which the trainer would
make them, and what it reads and writes is counted. With as many tokens as leave no expert without one, which is the common
case, nothing is assumed. With fewer, experts are drawn with the probability that uniform routing gives each,
``1 - (1 - K / E) ** T``, from a fixed seed, and the figure is marked so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from tierstore.prefetch.plan import GradientPlan, group_order
from tierstore.prefetch.predictor import make_predictor
from tierstore.prefetch.schedule import Pass, Schedule
from tierstore.store.adamw import Inactive
from tierstore.store.config import StoreConfig
from tierstore.store.format import Group
from tierstore.store.opening import make_residency, record_frame_bytes

__all__ = ["Moved", "Span", "Traffic", "step_traffic"]


@dataclass(frozen=True)
class Span:
    """Which steps of a run count: ``steps`` of them, after ``warm_up``."""

    warm_up: int = 6
    steps: int = 8


#: An expert that is reached with at least this probability is taken to be reached.
_CERTAIN = 1 - 1e-6

_Units = npt.NDArray[np.uint32]
_Flags = npt.NDArray[np.uint16]
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
    they were read for, or that room was made for; ``active`` is the share of its experts that a pass reaches.
    """

    read_bytes: int
    written_bytes: int
    moved_for: Mapping[tuple[Phase, int], Moved]
    hits: float
    misses: float
    active: float
    evidence: Evidence


def step_traffic(setting: Setting, taken: Capacity, span: Span | None = None) -> Traffic:
    """Bytes of a step under the budgets of ``taken``, a mean over ``span``. Commits are not counted.

    Raises BudgetError.
    """
    try:
        return _Drive(setting, taken).run(span or Span())
    except CapacityError as error:
        raise BudgetError(f"host_budget: {error}") from error


class _Drive:
    """The trainer's accesses, in its order."""

    def __init__(self, setting: Setting, taken: Capacity) -> None:
        self._setting = setting
        config, model = setting.config, setting.model
        self._layers = model.moe_layers
        self._place = {layer: place for place, layer in enumerate(self._layers)}
        self._local = setting.local_experts
        self._deferred = config.gradient_plan is GradientPlan.DEFERRED
        self._exact = config.adamw.inactive is Inactive.EXACT
        self._again = config.model.checkpoint_activations is CheckpointActivations.BLOCK
        self._depth = config.prefetch.depth
        self._schedule = Schedule.of_layers(self._layers, depth=self._depth)
        tokens = setting.tokens * setting.ranks.sharing
        reached = 1 - (1 - model.top_k / model.experts) ** tokens
        self._reached = 1.0 if reached >= _CERTAIN else reached
        self._random = np.random.default_rng(0)
        self._group_bytes = np.array([setting.schema.layout(group).slot_bytes for group in Group], np.int64)
        self._residency = self._make(taken)
        self._predictor = make_predictor(
            config.prefetch.predictor, range(self._local), most=config.prefetch.guesses
        )
        #: Of each expert of each layer: steps that its content has had, and whether a gradient of it is kept.
        self._steps = {layer: np.zeros(self._local, np.int64) for layer in self._layers}
        self._kept = {layer: np.zeros(self._local, bool) for layer in self._layers}
        self._applied = 0
        self._first = self._last = True
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
        for layer in self._layers:
            for expert in range(self._local):
                one = np.array([expert], np.uint32)
                self._access(Phase.INIT, layer, one, _all(Need.STEP, one), _nothing)
        self._residency.clean()

    def run(self, span: Span) -> Traffic:
        self._register()
        for step in range(span.warm_up):
            self._step(step)
        before = self._residency.stats()
        self._moved_for.clear()
        for step in range(span.warm_up, span.warm_up + span.steps):
            self._step(step)
        after = self._residency.stats()

        def mean(name: str) -> float:
            return (int(str(after[name])) - int(str(before[name]))) / span.steps

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
        micros = self._setting.config.data.micro_batches
        for micro in range(micros):
            self._first, self._last = micro == 0, micro == micros - 1
            used = {layer: self._draw() for layer in self._layers}
            for layer in self._layers:
                self._forward(layer, used)
            for layer in reversed(self._layers):
                self._backward(layer, used)
        self._applied += 1
        self._residency.end_step()
        every = self._setting.config.cache.write_back_every
        if every and (step + 1) % every == 0:
            # Of a simulated step they hold up the next reads, though nothing in a run waits for them: no better is known.
            self._charge(Phase.FORWARD, self._layers[0], self._residency.clean())

    def _draw(self) -> _Units:
        if self._reached == 1.0:
            return np.arange(self._local, dtype=np.uint32)
        return np.flatnonzero(self._random.random(self._local) < self._reached).astype(np.uint32)

    def _forward(self, layer: int, used: dict[int, _Units]) -> None:
        chosen, kept, steps = used[layer], self._kept[layer], self._steps[layer]
        pending = self._first and self._deferred
        following = self._schedule.following(Phase.FORWARD, layer, training=True)

        def caught_up(part: _Units, flags: _Flags) -> None:
            steps[part[flags != Need.WEIGHTS]] = self._applied
            if pending:
                kept[part] = False

        flags = self._forward_flags(layer, chosen)
        self._access(Phase.FORWARD, layer, chosen, flags, caught_up, following, used)
        self._predictor.observe(layer, chosen.tolist())
        if pending:  # gradients of experts that this pass did not ask for are stepped behind it
            rest = np.flatnonzero(kept).astype(np.uint32)
            self._access(Phase.OPTIMIZER, layer, rest, _all(Need.STEP_SPILLED, rest), caught_up)

    def _forward_flags(self, layer: int, chosen: _Units) -> _Flags:
        """As the present micro-batch asks for experts: what waits of the step before is stepped first."""
        return self._flags(chosen, layer, self._applied, pending=self._first and self._deferred)

    def _flags(self, chosen: _Units, layer: int, applied: int, *, pending: bool) -> _Flags:
        behind = (applied > self._steps[layer][chosen]) & self._exact
        flags = np.where(behind, int(Need.STEP), int(Need.WEIGHTS))
        return np.where(self._kept[layer][chosen] & pending, int(Need.STEP_SPILLED), flags).astype(np.uint16)

    def _backward(self, layer: int, used: dict[int, _Units]) -> None:
        chosen, kept = used[layer], self._kept[layer]
        following = self._schedule.following(Phase.BACKWARD, layer, training=True)
        if self._again:
            own = next(p for p in self._schedule.passes if p.phase is Phase.BACKWARD and p.moe_layer == layer)
            ahead = [own, *following][: self._depth]
            flags = self._flags(chosen, layer, self._applied, pending=False)
            self._access(Phase.FORWARD, layer, chosen, flags, _nothing, ahead, used)
        before = kept.copy()
        steps_now = self._last and not self._deferred

        def taken(part: _Units, _: _Flags) -> None:
            kept[part] = not steps_now
            if steps_now:
                self._steps[layer][part] = self._applied + 1

        flags = self._backward_flags(layer, chosen)
        self._access(Phase.BACKWARD, layer, chosen, flags, taken, following, used)
        if not self._last:
            return
        rest = np.setdiff1d(np.flatnonzero(before), chosen).astype(np.uint32)
        if self._deferred:
            self._access(Phase.BACKWARD, layer, rest, _all(Need.GRADIENTS, rest), _nothing)
        else:
            self._access(Phase.OPTIMIZER, layer, rest, _all(Need.STEP_SPILLED, rest), taken)

    def _backward_flags(self, layer: int, chosen: _Units) -> _Flags:
        if self._deferred or not self._last:
            return _all(Need.WEIGHTS | Need.ACCUMULATE, chosen)
        kept = self._kept[layer][chosen]
        return np.where(kept, int(Need.STEP_SPILLED), int(Need.STEP)).astype(np.uint16)

    def _speculate(self, ahead: Sequence[Pass], used: dict[int, _Units]) -> None:
        for item in ahead:
            layer = item.moe_layer
            assert layer is not None
            if item.phase is Phase.BACKWARD:
                known = item.later == 0 and layer in used
                chosen = used[layer] if known else self._expected(layer)
                flags = self._backward_flags(layer, chosen)
            else:
                chosen = self._expected(layer)
                next_step = item.later > 0 and self._last
                pending = next_step or (item.later == 0 and self._first and self._deferred)
                flags = self._flags(chosen, layer, self._applied + next_step, pending=pending)
            if not len(chosen):
                continue
            numbers = self._numbers(layer, chosen)
            taken, decided = self._residency.prefetch(item.phase, layer, numbers, flags)
            self._charge(item.phase, layer, decided)
            if taken < len(chosen):  # nearer passes first, and none further once there is no room
                return

    def _expected(self, layer: int) -> _Units:
        return np.array(self._predictor.predict(layer), np.uint32)

    # The residency core ------------------------------------------------------------------------------------

    def _numbers(self, layer: int, chosen: _Units) -> _Units:
        return (chosen + self._place[layer] * self._local).astype(np.uint32)

    def _access(
        self,
        phase: Phase,
        layer: int,
        chosen: _Units,
        flags: _Flags,
        done: Callable[[_Units, _Flags], None],
        ahead: Sequence[Pass] = (),
        used: dict[int, _Units] | None = None,
    ) -> None:
        """One atomic access. ``done`` hears of each group, with its flags, when it has been worked on; while the last one
        is open, the passes ``ahead`` are speculated on.
        """
        if not len(chosen):
            return
        numbers = self._numbers(layer, chosen)
        groups, _ = self._residency.begin_access(phase, layer, numbers, flags)
        for group in range(groups):
            units, demanded, following = self._residency.next_group()
            self._charge(phase, layer, demanded)
            self._charge(phase, layer, following)
            if group == groups - 1:
                self._speculate(ahead, used or {})
            self._residency.end_group()
            done(chosen[units], flags[units])

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


def _all(need: Need, chosen: _Units) -> _Flags:
    return np.full(len(chosen), int(need), np.uint16)


def _nothing(_: _Units, __: _Flags) -> None:
    return
