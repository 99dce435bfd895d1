"""Bytes that a step reads from and writes to disk, counted by the residency core itself.

The accesses of a training step are known, except for the experts that the router chooses. The residency core of a run, with
its policy, budget and lookahead, is driven through the run's access program for some steps, and its reads and writes are
counted. If the tokens reach every expert, the common case, nothing is assumed. With fewer tokens each expert is drawn, from
a fixed seed, with its probability under uniform routing, ``1 - (1 - K / E) ** T``, and the figure is marked as assumed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tierstore._native import CapacityError, Decision, Residency, StepClock
from tierstore.cache.access import GROUP_STRIDE, Need, Phase
from tierstore.cache.frames import frames_of
from tierstore.errors import BudgetError
from tierstore.machine_profile import Evidence
from tierstore.model.config import CheckpointActivations
from tierstore.plan.capacity import Capacity, Setting
from tierstore.prefetch.plan import StepTiming, group_order
from tierstore.prefetch.predictor import Predictor, make_predictor
from tierstore.prefetch.program import (
    Access,
    AccessProgram,
    Action,
    Experts,
    Finals,
    FrozenProgram,
    PassProgram,
    Speculation,
)
from tierstore.prefetch.schedule import MicroPass, Schedule
from tierstore.store.adamw import Inactive
from tierstore.store.config import StoreConfig
from tierstore.store.format import Group
from tierstore.store.opening import make_residency, record_frame_bytes

#: The steps that are driven first, and those that are counted.
SPAN = (6, 8)
#: From this probability on, an expert counts as always reached.
_CERTAIN = 1 - 1e-6

_Decided = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]


@dataclass(frozen=True)
class Moved:
    """``loaded``: bytes read that an expert's computation waits for. ``state``: bytes read that only its optimizer step
    waits for (in a backward pass, moments and spilled gradients). ``written``: bytes written to disk to make room.
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
    """Means per step of one rank in the steady state. ``moved_for``: bytes by the phase and layer that needed them.
    ``active``: the fraction of the rank's experts that a pass reaches.
    """

    read_bytes: int
    written_bytes: int
    moved_for: Mapping[tuple[Phase, int], Moved]
    hits: float
    misses: float
    active: float
    evidence: Evidence


def step_traffic(
    setting: Setting, taken: Capacity, span: tuple[int, int] = SPAN, *, order: Sequence[MicroPass] = ()
) -> Traffic:
    """The traffic of a step under the budgets of ``taken``, a mean over ``span`` (as in ``SPAN``), without commits.

    ``order``: the passes of a pipeline stage in order (empty: one micro-batch after another).

    Raises BudgetError.
    """
    try:
        return _Drive(setting, taken, order).run(*span)
    except CapacityError as error:
        raise BudgetError(f"host_budget: {error}") from error


class CountedSteps:
    """``StepCounts`` without records; ``done`` must be called with each access."""

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
    """Replays the trainer's accesses in order. Records: one per expert, followed by one per expert's pairs, if any."""

    def __init__(self, setting: Setting, taken: Capacity, order: Sequence[MicroPass] = ()) -> None:
        self._setting = setting
        self._order = tuple(order)
        config, model = setting.config, setting.model
        self._layers = model.moe_layers
        self._index = {layer: index for index, layer in enumerate(self._layers)}
        self._local = setting.local_experts
        tokens = setting.tokens * setting.sharing
        reached = 1 - (1 - model.top_k / model.experts) ** tokens
        self._reached = 1.0 if reached >= _CERTAIN else reached
        self._random = np.random.default_rng(0)
        kinds = setting.schemas
        self._group_bytes = np.array(
            [[kind.layout(group).slot_bytes for group in Group] for kind in kinds], np.int64
        )
        self._residency = self._make(taken)
        replays = config.adamw.inactive is Inactive.EXACT
        self._counts = CountedSteps(self._layers, self._local, replays=replays)
        self._base = FrozenProgram(*self._ahead()) if setting.usage.frozen else None
        #: The program of what is trained: experts or their pairs.
        self._trained: AccessProgram | None = None
        if not kinds[-1].frozen:
            self._trained = AccessProgram(
                *self._ahead(), self._counts, timing=config.step_timing, experts=self._local
            )
        self._moved_for: defaultdict[tuple[Phase, int], Moved] = defaultdict(Moved)

    def _ahead(self) -> tuple[Schedule, Predictor]:
        config = self._setting.config.prefetch
        predictor = make_predictor(config.predictor, range(self._local), most=config.guesses)
        return Schedule.of_layers(self._layers, depth=config.depth, order=self._order), predictor

    def _make(self, taken: Capacity) -> Residency:
        setting = self._setting
        frame = record_frame_bytes(setting.schemas)
        store = StoreConfig(
            host_budget=taken.divided.cache,
            lookahead=taken.divided.lookahead,
            layers=self._layers,
            cache=setting.config.cache,
            group_order=group_order(
                replicas=setting.replicas,
                chunks=setting.config.parallel.most_chunks(
                    experts=setting.model.experts, sharing=setting.sharing
                ),
            ),
            clock=StepClock.STEPS,
        )
        residency = make_residency(store, max(taken.divided.cache // frame, 1), frame)
        for schema in setting.schemas:
            layouts = [schema.layout(group) for group in Group]
            frames = [frames_of([section.nbytes for section in one.sections], frame) for one in layouts]
            sizes = [one.slot_bytes for one in layouts]
            for layer in self._layers:
                for _ in range(self._local):  # frozen records were imported: they are on disk
                    residency.add_record(layer, frames, sizes, 1 << Group.WEIGHTS if schema.frozen else 0)
        return residency

    def _register(self) -> None:
        """Fill every trained record with one access, and commit: the initial cache contents can affect all later steps."""
        if self._trained is None:
            return
        flags, no_action = np.array([Need.STEP], np.uint16), np.zeros(1, np.uint8)
        for layer in self._layers:
            for expert in range(self._local):
                one = np.array([expert], np.uint32)
                access = Access(Phase.INIT, layer, one, flags, no_action, step=0)
                self._carry_out(self._trained, [access])
        self._residency.clean()

    def run(self, warm_up: int, steps: int) -> Traffic:
        self._register()
        for step in range(warm_up):
            self._step(step)
        before = self._residency.stats()
        self._moved_for.clear()
        for step in range(warm_up, warm_up + steps):
            self._step(step)
        after = self._residency.stats()

        def mean(name: str) -> float:
            return float(getattr(after, name) - getattr(before, name)) / steps

        return Traffic(
            read_bytes=round(mean("read_bytes")),
            written_bytes=round(mean("written_bytes")),
            moved_for={what: moved // steps for what, moved in self._moved_for.items()},
            hits=mean("hits"),
            misses=mean("misses"),
            active=self._reached,
            evidence=Evidence.FORMULA if self._reached == 1.0 else Evidence.ASSUMED,
        )

    # One step ----------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        config, passes = self._setting.config, self._setting.config.data.passes
        if not self._setting.usage.trains:
            assert self._base is not None
            self._base.begin_evaluation()
            for layer in self._layers:
                self._carry_out(self._base, self._base.forward(layer, self._draw()))
            self._residency.end_step()
            return
        # In layer order a block is recomputed within its backward access.
        recomputes = (
            config.model.checkpoint_activations is CheckpointActivations.BLOCK and not config.data.layer_major
        )
        one_by_one = [
            MicroPass(phase, micro) for micro in range(passes) for phase in (Phase.FORWARD, Phase.BACKWARD)
        ]
        drawn: dict[int, dict[int, Experts]] = {}
        for turn in self._order or one_by_one:
            if turn.phase is Phase.FORWARD:
                for program in self._programs():
                    program.begin_micro(index=turn.micro, count=passes)
                used = drawn[turn.micro] = {layer: self._draw() for layer in self._layers}
                for layer in self._layers:
                    self._forward(layer, used[layer])
                continue
            if self._order:
                for program in self._programs():
                    program.resume_micro(index=turn.micro, finals=Finals.LAST)
            used = drawn.pop(turn.micro)
            for layer in reversed(self._layers):
                if recomputes:
                    self._forward(layer, used[layer])
                self._backward(layer, used[layer])
        every = config.cache.write_back_every
        if every and (step + 1) % every == 0:
            # In the simulation these writes delay the next reads; in a run nothing waits for them.
            self._charge(Phase.FORWARD, self._layers[0], self._residency.clean())
        if config.step_timing is StepTiming.DEFERRED and self._trained is not None:
            self._trained.apply()
        self._counts.applied += 1
        self._residency.end_step()

    def _programs(self) -> Iterator[PassProgram]:
        """The program of the pairs before that of the experts, as in ``LoraExperts``."""
        for program in (self._trained, self._base):
            if program is not None:
                yield program

    def _forward(self, layer: int, experts: Experts) -> None:
        for program in self._programs():
            self._carry_out(program, program.forward(layer, experts))

    def _backward(self, layer: int, experts: Experts) -> None:
        if self._base is not None:
            if self._trained is not None:  # the pairs' weights first, their gradients after the experts
                self._carry_out(self._trained, self._trained.forward(layer, experts))
            self._carry_out(self._base, self._base.backward(layer, experts))
        if self._trained is not None:
            self._carry_out(self._trained, self._trained.backward(layer, experts))

    def _draw(self) -> Experts:
        if self._reached == 1.0:
            return np.arange(self._local, dtype=np.uint32)
        return np.flatnonzero(self._random.random(self._local) < self._reached).astype(np.uint32)

    # The residency core ------------------------------------------------------------------------------------

    def _carry_out(self, program: PassProgram, accesses: Iterable[Access]) -> None:
        first = self._first(program)
        for access in accesses:
            phase, layer = access.phase, access.layer
            numbers = self._numbers(layer, access.experts, first)
            groups, _ = self._residency.begin_access(phase, layer, numbers, access.flags)
            for group in range(groups):
                requests, demanded, following = self._residency.next_group()
                self._charge(phase, layer, demanded)
                self._charge(phase, layer, following)
                if group == groups - 1:
                    prefetch = partial(self._prefetch, first)
                    program.speculate(access, prefetch, self._residency.cancel_prefetch)
                self._residency.end_group()
                if program is self._trained:
                    self._counts.done(access, requests)
                program.done(access, requests)

    def _prefetch(self, first: int, ahead: Speculation) -> int:
        numbers = self._numbers(ahead.layer, ahead.experts, first)
        taken, decided = self._residency.prefetch(ahead.phase, ahead.layer, numbers, ahead.flags)
        self._charge(ahead.phase, ahead.layer, decided)
        return taken

    def _first(self, program: PassProgram) -> int:
        """The number of the first record that ``program`` accesses."""
        pairs = program is self._trained and self._base is not None
        return self._local * len(self._layers) if pairs else 0

    def _numbers(self, layer: int, experts: Experts, first: int) -> Experts:
        return (experts + self._index[layer] * self._local + first).astype(np.uint32)

    def _charge(self, phase: Phase, layer: int, decided: _Decided) -> None:
        decisions, entries = decided
        groups = entries % GROUP_STRIDE
        kinds = entries // GROUP_STRIDE // (self._local * len(self._layers))
        nbytes = self._group_bytes[kinds, groups]
        fetched = decisions == Decision.FETCH
        written = (decisions == Decision.EVICT_WRITE) | (decisions == Decision.WRITE_BACK)
        state = fetched & (groups != Group.WEIGHTS) & (phase is Phase.BACKWARD)
        self._moved_for[phase, layer] += Moved(
            int(nbytes[fetched & ~state].sum()), int(nbytes[state].sum()), int(nbytes[written].sum())
        )
