"""The access program: which accesses of the host cache a training step makes, and what each does with its experts.

``TieredExperts`` carries the program out on a store; ``plan.traffic`` runs the same program to count bytes. The program
knows the state of all gradients, the experts that the current micro-batch used, and the passes that schedule and predictor
expect next. ``StepCounts`` tells it how many steps each expert has taken. It has no store, no tensors and no clock. The
program of frozen experts (``FrozenProgram``) requests weights only.

::

    for access in program.forward(layer, experts):   # the pass, then the accesses that must follow it
        ...                                          # begin the access; then for each group of its requests:
            program.speculate(access, prefetch, cancel)  # while the last group is open
            program.done(access, requests)           #     once their actions have been taken

What trained experts request (``Need``) and what is done with them (``Action``). *last*: the pass of the micro-batch that
makes gradients final. *after*: the access that follows the pass, for experts of the layer that the pass did not request and
whose gradient is in the state named. If the number of micro-batches is unknown, none is the last, and ``finish`` makes the
access after it. Under ``StepTiming.DEFERRED``, ``apply`` then makes all kept gradients pending. ::

    pass             expert   requests               actions                     after
    backward         none     WEIGHTS | ACCUMULATE   KEEP                        nothing
                     kept     WEIGHTS | ACCUMULATE   ACCUMULATE
    last, DEFERRED   none     WEIGHTS | ACCUMULATE   KEEP, FINISH                kept: GRADIENTS; FINISH
                     kept     WEIGHTS | ACCUMULATE   ACCUMULATE, FINISH
    last, IMMEDIATE  none     STEP                   FINISH, STEP                kept: STEP_SPILLED; FINISH, STEP
                     kept     STEP_SPILLED           ACCUMULATE, FINISH, STEP
    forward          pending  STEP_SPILLED           STEP                        pending: STEP_SPILLED; STEP
                     behind   STEP                   CATCH_UP                    (not after a recomputation)
                     other    WEIGHTS                nothing

An expert is *behind* if it missed steps that are replayed; with ``inactive = skip`` none is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore.cache.access import Need, Phase
from tierstore.prefetch.plan import StepTiming
from tierstore.prefetch.predictor import Counts, Predictor
from tierstore.prefetch.schedule import Pass, Schedule

Experts = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.uint16]
Actions = npt.NDArray[np.uint8]


_NONE: Experts = np.zeros(0, np.uint32)


class Action(IntFlag):
    """What happens to a requested expert, in this order: ``CATCH_UP`` before it is used, the rest once its gradient has
    arrived. (``STEP`` alone steps a pending gradient, also before the expert is used.)
    """

    CATCH_UP = 1 << 0  # replay the steps that it missed
    KEEP = 1 << 1  # keep its gradient, the step's first, in the host cache
    ACCUMULATE = 1 << 2  # add its gradient to the kept one
    FINISH = 1 << 3  # its gradient is final: compute its sum of squares for the norm
    STEP = 1 << 4  # step it, with its final gradient


class Finals(Enum):
    """Whether a step's last backward pass makes gradients final. ``NONE``: no, because the step will be skipped."""

    LAST = "last"
    NONE = "none"


class GradientState(IntEnum):
    """The state of an expert's gradient between accesses."""

    NONE = 0
    KEPT = 1  # in the host cache, until more are added or the norm is known
    PENDING = 2  # final, and the norm is known: to be stepped before the expert is used again


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """One atomic access: for each of ``experts`` (ascending) its flags (``Need``) and its ``Action``.

    ``step``: the optimizer step that ``Action.STEP`` takes. ``ahead``: the passes to prefetch for meanwhile.
    """

    phase: Phase
    layer: int
    experts: Experts
    flags: Flags
    actions: Actions
    step: int
    ahead: Sequence[Pass] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Speculation:
    """Experts that a coming pass is expected to request, with their flags. ``later``: as in ``Pass``."""

    phase: Phase
    layer: int
    experts: Experts
    flags: Flags
    later: int = 0


@dataclass(slots=True)
class GuessCounts:
    """Counts for all forward passes: experts ``used``, experts ``guessed`` before, and guesses that were ``right``."""

    used: int = 0
    guessed: int = 0
    right: int = 0


class StepCounts(Protocol):
    """How many optimizer steps were applied: ``applied`` to the model, ``of`` to individual experts."""

    @property
    def applied(self) -> int: ...

    @property
    def replays(self) -> bool:
        """Whether experts replay the steps in which they got no gradient."""
        ...

    def of(self, layer: int, experts: Experts) -> npt.NDArray[np.int64]:
        """The number of steps applied to each of ``experts``."""
        ...


class PassProgram(ABC):
    """The passes over the MoE layers of ``schedule``: the experts that each used, and the passes that come next.

    Accesses come from iterators: carry each one out before taking the next.
    """

    def __init__(self, schedule: Schedule, predictor: Predictor) -> None:
        self._schedule = schedule
        self._predictor = predictor
        #: Experts used in forward passes of the micro-batches under way, by ``Pass.micro`` and layer.
        self._used: dict[int, dict[int, Experts]] = {0: {}}
        #: The current micro-batch (``Pass.micro``).
        self._micro = 0
        #: The micro-batch whose backward pass makes gradients final. None: there is none, or their number is unknown; where
        #: passes do not interleave, so that each micro-batch is number 0, also as long as the last one has not begun.
        self._last: int | None = None
        self._training = False
        #: Counts of all forward passes so far.
        self.guesses = GuessCounts()
        self._guessed: dict[int, Experts] = {}
        #: Whether the current forward pass does not use all experts that were guessed for it.
        self._wrong = False

    @abstractmethod
    def forward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A forward pass, and the accesses that must follow it.

        A second forward pass of a layer in a micro-batch is its recomputation (activation checkpointing): the same
        experts, and the layer's backward pass comes next.
        """

    @abstractmethod
    def backward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A backward pass, and the accesses that must follow it."""

    def begin_micro(self, *, index: int, count: int | None) -> None:
        """Begin training micro-batch ``index`` of ``count``. If the count is unknown (None), gradients are kept until
        ``finish``, and their steps are deferred.
        """
        if index == 0 or not self._schedule.interleaves:
            self._used.clear()
        self._training = True
        self._micro = index if self._schedule.interleaves else 0
        self._used[self._micro] = {}
        last = None if count is None else count - 1
        if not self._schedule.interleaves:
            last = self._micro if index == last else None
        self._last = last

    def resume_micro(self, *, index: int, finals: Finals) -> None:
        """Resume micro-batch ``index`` for its backward pass, in a schedule whose passes interleave."""
        self._micro = index
        if finals is Finals.NONE:
            self._last = None

    def begin_evaluation(self) -> None:
        """Begin a run of forward passes only, until the next ``begin_micro``."""
        self._training = False
        self._micro, self._last = 0, None
        self._used = {0: {}}

    @abstractmethod
    def done(self, access: Access, requests: Sequence[int] | npt.NDArray[np.uint32]) -> None:
        """Record that the actions of ``requests`` (indices into ``access``) have been taken."""

    def reach(self, layer: int) -> list[int]:
        """The MoE layers whose forward passes in this micro-batch are within the lookahead of the next pass, that of
        ``layer``. Empty if it is a recomputation.
        """
        if self._training and layer in self._used[self._micro]:
            return []
        return [
            item.moe_layer
            for item in self._ahead(Phase.FORWARD, layer)
            if item.phase is Phase.FORWARD
            and (item.later, item.micro) == (0, self._micro)
            and item.moe_layer is not None
        ]

    def _ahead(self, phase: Phase, layer: int) -> list[Pass]:
        return self._schedule.following(phase, layer, training=self._training, micro=self._micro)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        """Tell the predictor what the router of ``layer`` chooses for the input of layer ``source``."""
        self._predictor.offer(source, layer, chosen_E)

    def speculate(
        self, access: Access, prefetch: Callable[[Speculation], int], cancel: Callable[[], None]
    ) -> None:
        """Call ``prefetch`` for the passes ahead of ``access``, nearest first. Stop at the first pass that does not fit
        completely. After a wrong guess for the current pass, first call ``cancel``, which gives up all prefetched and
        unused experts: otherwise wrong guesses would keep their memory until the end of the step, and decoding has no
        steps. Experts that are still expected are in memory, and are prefetched again.
        """
        if not access.ahead:  # an access outside the passes prefetches and cancels nothing
            return
        if self._wrong:
            cancel()
        self._wrong = False
        for item in access.ahead:
            wanted = self._speculation(item)
            if len(wanted.experts) and prefetch(wanted) < len(wanted.experts):
                return

    def stepped_again(self, access: Access) -> Speculation:
        """Of the experts that ``access`` steps, those that the layer's forward pass in the next step is expected to
        request.
        """
        stepped = access.experts[access.actions & Action.STEP != 0]
        experts = np.intersect1d(stepped, self._expected(access.layer))
        return Speculation(Phase.FORWARD, access.layer, experts, _weights(experts), later=1)

    @property
    @abstractmethod
    def trains(self) -> bool:
        """Whether the experts of the current pass will be stepped in the host cache."""

    @abstractmethod
    def unchanged(self, ahead: Speculation) -> npt.NDArray[np.bool_]:
        """Which of the experts already have the weights that the coming pass uses: no step or replay remains to be queued
        before it.
        """

    @abstractmethod
    def _forward_flags(self, layer: int, experts: Experts, *, later: int) -> Flags:
        """The flags of ``experts`` in a forward pass ``later`` cycles from now."""

    @abstractmethod
    def _backward_flags(self, layer: int, experts: Experts, *, micro: int) -> Flags:
        """The flags of ``experts`` in the backward pass of ``micro``."""

    def _forward_pass(self, layer: int, chosen: Experts) -> tuple[bool, Sequence[Pass]]:
        """Whether a forward pass is a recomputation, and the passes ahead of it."""
        used = self._used[self._micro]
        if self._training and layer in used:
            return True, self._schedule.recomputed(layer, micro=self._micro)
        used[layer] = chosen
        guessed = self._guessed.pop(layer, _NONE)
        right = len(set(guessed.tolist()).intersection(chosen.tolist()))
        self.guesses.used += len(chosen)
        self.guesses.guessed += len(guessed)
        self.guesses.right += right
        self._wrong = right < len(guessed)
        return False, self._ahead(Phase.FORWARD, layer)

    def _speculation(self, item: Pass) -> Speculation:
        layer = item.moe_layer
        assert layer is not None
        if item.phase is Phase.BACKWARD:
            known = self._used.get(item.micro, {}).get(layer) if item.later == 0 else None
            experts = self._expected(layer) if known is None else known
            flags = self._backward_flags(layer, experts, micro=item.micro)
            return Speculation(item.phase, layer, experts, flags, item.later)
        experts = self._guessed[layer] = self._expected(layer)
        flags = self._forward_flags(layer, experts, later=item.later)
        return Speculation(item.phase, layer, experts, flags, item.later)

    def _expected(self, layer: int) -> Experts:
        return np.array(self._predictor.predict(layer), np.uint32)


class FrozenProgram(PassProgram):
    """The accesses to experts that are not trained: passes only read weights."""

    def __init__(self, schedule: Schedule, predictor: Predictor) -> None:
        super().__init__(schedule, predictor)
        self._requesters: Mapping[int, int] = {}

    def begin_evaluation(self) -> None:
        """Begin a run of forward passes only, until the next ``begin_micro``."""
        super().begin_evaluation()
        self._requesters = {}

    def set_requesters(self, requesters: Mapping[int, int]) -> None:
        """Set which sequences request each expert in the next forward pass: a bit mask (``Need.FIRST_SEQUENCE``)."""
        self._requesters = requesters

    def forward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A forward pass, or its recomputation."""
        chosen = np.asarray(experts, np.uint32)
        again, ahead = self._forward_pass(layer, chosen)
        access = self._access(Phase.FORWARD, layer, chosen, ahead)
        if self._requesters:
            masks = [self._requesters.get(expert, 0) for expert in chosen.tolist()]
            access.flags[:] |= np.array(masks, np.uint16) * np.uint16(Need.FIRST_SEQUENCE)
            self._requesters = {}
        yield access
        if not again:
            self._predictor.observe(layer, chosen.tolist())

    def backward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A backward pass: gradients flow through the experts, which get none themselves."""
        ahead = self._ahead(Phase.BACKWARD, layer)
        yield self._access(Phase.BACKWARD, layer, np.asarray(experts, np.uint32), ahead)

    def done(self, access: Access, requests: Sequence[int] | npt.NDArray[np.uint32]) -> None:
        """Does nothing: frozen experts have no actions."""

    @property
    def trains(self) -> bool:
        return False

    def unchanged(self, ahead: Speculation) -> npt.NDArray[np.bool_]:
        """All of them."""
        return np.ones(len(ahead.experts), np.bool_)

    def _access(self, phase: Phase, layer: int, experts: Experts, ahead: Sequence[Pass]) -> Access:
        return Access(phase, layer, experts, _weights(experts), np.zeros(len(experts), np.uint8), 0, ahead)

    def _forward_flags(self, layer: int, experts: Experts, *, later: int) -> Flags:
        return _weights(experts)

    def _backward_flags(self, layer: int, experts: Experts, *, micro: int) -> Flags:
        return _weights(experts)


def _weights(experts: Experts) -> Flags:
    return np.full(len(experts), int(Need.WEIGHTS), np.uint16)


class AccessProgram(PassProgram):
    """The accesses to experts that are trained. Their ids run from 0 to ``experts - 1``."""

    def __init__(
        self,
        schedule: Schedule,
        predictor: Predictor,
        counts: StepCounts,
        *,
        timing: StepTiming,
        experts: int,
    ) -> None:
        super().__init__(schedule, predictor)
        self._counts = counts
        #: When a final gradient becomes a step.
        self._timing = timing
        layers = sorted({item.moe_layer for item in schedule.passes if item.moe_layer is not None})
        self._gradients = {layer: np.zeros(experts, np.uint8) for layer in layers}
        self._last = 0

    # Where training stands ---------------------------------------------------------------------------------

    def apply(self) -> None:
        """Make the kept gradients pending: the norm is known."""
        for state in self._gradients.values():
            state[state == GradientState.KEPT] = GradientState.PENDING

    def discard(self) -> None:
        """Drop the kept gradients: the step is skipped."""
        for state in self._gradients.values():
            state[:] = GradientState.NONE

    def gradient(self, layer: int, expert: int) -> GradientState:
        return GradientState(self._gradients[layer][expert])

    def kept(self) -> Iterator[tuple[int, int]]:
        """The layer and expert of each gradient that is kept or pending."""
        for layer, state in self._gradients.items():
            for expert in np.flatnonzero(state).tolist():
                yield layer, expert

    # Accesses ----------------------------------------------------------------------------------------------

    def forward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A forward pass, and the steps of pending gradients of experts that it did not request."""
        chosen = np.asarray(experts, np.uint32)
        again, ahead = self._forward_pass(layer, chosen)
        flags = self._forward_flags(layer, chosen, later=0)
        actions = np.select(
            [flags == Need.STEP_SPILLED, flags == Need.STEP], [int(Action.STEP), int(Action.CATCH_UP)]
        )
        yield self._access(Phase.FORWARD, layer, chosen, flags, actions, ahead)
        if not again:
            self._predictor.observe(layer, chosen.tolist())
            yield from self.pending(layer)

    def backward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A backward pass. In the last micro-batch another access may follow, which finishes the gradients of experts that
        only earlier micro-batches used.
        """
        chosen = np.asarray(experts, np.uint32)
        kept = self._gradients[layer][chosen] != GradientState.NONE
        actions = np.where(kept, int(Action.ACCUMULATE), 0 if self._steps_now else int(Action.KEEP))
        final = (Action.FINISH if self._is_last else 0) | (Action.STEP if self._steps_now else 0)
        flags = self._backward_flags(layer, chosen, micro=self._micro)
        ahead = self._ahead(Phase.BACKWARD, layer)
        yield self._access(Phase.BACKWARD, layer, chosen, flags, actions | final, ahead)
        if not self._is_last:
            return
        left = np.setdiff1d(np.flatnonzero(self._gradients[layer]), chosen)
        if self._steps_now:
            yield from self._rest(
                Phase.OPTIMIZER, layer, left, Need.STEP_SPILLED, Action.FINISH | Action.STEP
            )
        else:
            yield from self._rest(Phase.BACKWARD, layer, left, Need.GRADIENTS, Action.FINISH)

    def finish(self) -> Iterator[Access]:
        """Finish the kept gradients, after the last backward pass of a step whose micro-batch count was unknown."""
        for layer in reversed(self._gradients):
            left = np.flatnonzero(self._gradients[layer] == GradientState.KEPT)
            yield from self._rest(Phase.BACKWARD, layer, left, Need.GRADIENTS, Action.FINISH)

    def pending(self, layer: int | None = None) -> Iterator[Access]:
        """The steps of the pending gradients of ``layer`` (of all layers when None)."""
        for number in self._gradients if layer is None else [layer]:
            due = np.flatnonzero(self._gradients[number] == GradientState.PENDING)
            yield from self._rest(Phase.OPTIMIZER, number, due, Need.STEP_SPILLED, Action.STEP)

    def done(self, access: Access, requests: Sequence[int] | npt.NDArray[np.uint32]) -> None:
        """Record that the actions of ``requests`` (indices into ``access``) have been taken."""
        state = self._gradients[access.layer]
        experts, actions = access.experts[requests], access.actions[requests]
        state[experts[actions & Action.KEEP != 0]] = GradientState.KEPT
        state[experts[actions & Action.STEP != 0]] = GradientState.NONE

    # What passes need --------------------------------------------------------------------------------------

    @property
    def _is_last(self) -> bool:
        """Whether the current micro-batch's backward pass makes the step's gradients final."""
        return self._micro == self._last

    @property
    def _steps_now(self) -> bool:
        return self._steps_in(self._micro)

    def _steps_in(self, micro: int) -> bool:
        return self._timing is StepTiming.IMMEDIATE and micro == self._last

    @property
    def trains(self) -> bool:
        return self._training

    def unchanged(self, ahead: Speculation) -> npt.NDArray[np.bool_]:
        """True for experts whose steps and replays before the pass are all queued. Without replays (``inactive = skip``)
        also False for experts that the current step may still step.
        """
        stepped, behind = self._due(ahead.layer, ahead.experts, later=ahead.later)
        changes = self._counts.replays or self._in_next_step(ahead.later)
        return ~(stepped | (behind & changes))

    def _in_next_step(self, later: int) -> bool:
        """Whether a pass ``later`` cycles from now comes after the current step has been applied."""
        return self._training and later > 0 and (self._is_last or self._schedule.interleaves)

    def _due(
        self, layer: int, experts: Experts, *, later: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """For a forward pass ``later`` cycles from now: the experts that it steps first, and those behind on steps."""
        next_step = self._in_next_step(later)
        due = GradientState.KEPT if next_step else GradientState.PENDING
        behind = self._counts.applied + next_step > self._counts.of(layer, experts)
        return self._gradients[layer][experts] >= due, behind

    def _forward_flags(self, layer: int, experts: Experts, *, later: int) -> Flags:
        stepped, behind = self._due(layer, experts, later=later)
        flags = np.where(behind & self._counts.replays, int(Need.STEP), int(Need.WEIGHTS))
        flags[stepped] = Need.STEP_SPILLED
        return flags.astype(np.uint16)

    def _backward_flags(self, layer: int, experts: Experts, *, micro: int) -> Flags:
        if not self._steps_in(micro):
            return np.full(len(experts), int(Need.WEIGHTS | Need.ACCUMULATE), np.uint16)
        kept = self._gradients[layer][experts] != GradientState.NONE
        return np.where(kept, int(Need.STEP_SPILLED), int(Need.STEP)).astype(np.uint16)

    def _rest(
        self, phase: Phase, layer: int, experts: npt.NDArray[np.int64], need: Need, action: Action
    ) -> Iterator[Access]:
        """An access outside the passes, unless ``experts`` is empty."""
        if len(experts):
            flags = np.full(len(experts), int(need), np.uint16)
            actions = np.full(len(experts), int(action))
            yield self._access(phase, layer, experts.astype(np.uint32), flags, actions)

    def _access(
        self,
        phase: Phase,
        layer: int,
        experts: Experts,
        flags: Flags,
        actions: npt.NDArray[np.int64],
        ahead: Sequence[Pass] = (),
    ) -> Access:
        # A deferred step is already counted as applied when its gradients are stepped, an immediate one is not.
        step = self._counts.applied + (self._timing is StepTiming.IMMEDIATE)
        return Access(phase, layer, experts, flags, actions.astype(np.uint8), step, ahead)
