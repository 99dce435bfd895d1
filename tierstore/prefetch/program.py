"""The access program: which accesses of the host cache a training step makes, and what each does with its experts.

``TieredExperts`` carries the program out on a store; ``plan.traffic`` runs the same program to count bytes. The program
knows which gradients wait and where, which experts the present micro-batch used, and what the schedule and the
predictor say comes next. It asks ``StepCounts`` how far each expert has been stepped. It has no store, no tensors and
no clock. The program of frozen experts (``FrozenProgram``) requests weights and nothing else.

::

    for access in program.forward(layer, experts):   # the pass, then what must follow it
        ...                                          # begin the access; then for each group of its requests:
            program.speculate(access, prefetch, cancel)  # while the last group is open
            program.done(access, requests)           #     once their actions have been taken
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
    """What happens to a requested expert, in this order: the first before it is computed with, the rest once its
    gradient has arrived. (``STEP`` alone is the step of a pending gradient, and comes first too.)
    """

    CATCH_UP = 1 << 0  # replay the steps that it missed
    KEEP = 1 << 1  # its gradient is the step's first, and waits in the host cache
    ACCUMULATE = 1 << 2  # its gradient is added to the one that waits
    FINISH = 1 << 3  # its gradient is final: the norm takes its sum of squares
    STEP = 1 << 4  # step it, with its final gradient


class Finals(Enum):
    """Whether the backward pass that is a step's last makes gradients final, or the step will be skipped."""

    LAST = "last"
    NONE = "none"


class GradientState(IntEnum):
    """Of an expert's gradient, between accesses."""

    NONE = 0
    KEPT = 1  # waits in the host cache for more, or for the norm
    PENDING = 2  # final, with the norm known: stepped before the expert is used again


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """One atomic access: for each of ``experts`` (ascending) its flags (``Need``) and its ``Action``.

    ``step`` is the one that ``Action.STEP`` takes an expert to; ``ahead`` the passes to speculate on meanwhile.
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
    """Experts of a coming pass, and what it would ask of them. ``later``: as in ``Pass``."""

    phase: Phase
    layer: int
    experts: Experts
    flags: Flags
    later: int = 0


@dataclass(slots=True)
class GuessCounts:
    """How forward passes were guessed: experts that they ``used``, that were ``guessed`` before, and that were both."""

    used: int = 0
    guessed: int = 0
    right: int = 0


class StepCounts(Protocol):
    """How many optimizer steps were applied to the whole model, and to the content of each expert."""

    @property
    def applied(self) -> int: ...

    @property
    def replays(self) -> bool:
        """Whether an expert replays the steps in which it got no gradient."""
        ...

    def of(self, layer: int, experts: Experts) -> npt.NDArray[np.int64]:
        """The steps of ``experts``."""
        ...


class PassProgram(ABC):
    """The passes over the MoE layers of ``schedule``: which experts each used, and what comes next.

    Accesses come from iterators: each is carried out before the next one is taken.
    """

    def __init__(self, schedule: Schedule, predictor: Predictor) -> None:
        self._schedule = schedule
        self._predictor = predictor
        #: What the forward passes of the micro-batches under way used, by ``Pass.micro`` and layer.
        self._used: dict[int, dict[int, Experts]] = {0: {}}
        #: The present one (``Pass.micro``), and the one in whose backward pass gradients are final (None: another one).
        self._micro = 0
        self._last: int | None = None
        self._training = False
        #: Of all forward passes so far.
        self.guesses = GuessCounts()
        self._guessed: dict[int, Experts] = {}
        #: Whether the present forward pass was guessed to use experts that it does not.
        self._wrong = False

    @abstractmethod
    def forward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A forward pass, and what must follow it.

        A second forward pass of a layer in a micro-batch is its recomputation (activation checkpointing): the same
        experts, and the layer's backward pass comes next.
        """

    @abstractmethod
    def backward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A backward pass, and what must follow it."""

    def begin_micro(self, *, index: int, count: int | None) -> None:
        """Training micro-batch ``index`` of ``count`` begins. Where the count is not known (None) gradients are kept until
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
        """The backward pass of micro-batch ``index`` follows, where passes interleave."""
        self._micro = index
        if finals is Finals.NONE:
            self._last = None

    def begin_evaluation(self) -> None:
        """Only forward passes follow, until the next ``begin_micro``."""
        self._training = False
        self._micro, self._last = 0, None
        self._used = {0: {}}

    @abstractmethod
    def done(self, access: Access, requests: Sequence[int] | npt.NDArray[np.uint32]) -> None:
        """The actions of these requests of ``access`` (by their places in it) have been taken."""

    def reach(self, layer: int) -> list[int]:
        """The MoE layers whose forward passes, in this micro-batch, the pass of ``layer`` that comes next looks ahead to.
        None where it is a recomputation.
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
        """What the router of ``layer`` chooses for the hidden states that ``source`` starts from, for the predictor."""
        self._predictor.offer(source, layer, chosen_E)

    def speculate(
        self, access: Access, prefetch: Callable[[Speculation], int], cancel: Callable[[], None]
    ) -> None:
        """Offers the passes ahead of ``access`` to ``prefetch``, nearest first, until it takes fewer experts than a
        pass is expected to use. Where the present pass was guessed wrongly, ``cancel`` first gives up all that was
        prefetched and not used: otherwise wrong guesses would keep their memory to the end of the step, and decoding
        knows no steps. What is still expected is in memory, and is prefetched again.
        """
        if not access.ahead:  # an access outside the passes looks at nothing ahead, and cancels nothing
            return
        if self._wrong:
            cancel()
        self._wrong = False
        for item in access.ahead:
            wanted = self._speculation(item)
            if len(wanted.experts) and prefetch(wanted) < len(wanted.experts):
                return

    @property
    @abstractmethod
    def trains(self) -> bool:
        """Whether the experts of the present pass are stepped in the host cache later on."""

    @abstractmethod
    def unchanged(self, ahead: Speculation) -> npt.NDArray[np.bool_]:
        """Which of the experts have the weights now that the coming pass computes with: no step and no replay of theirs is
        still to be queued before it.
        """

    @abstractmethod
    def _forward_flags(self, layer: int, experts: Experts, *, later: int) -> Flags:
        """What a forward pass, ``later`` steps from now, needs of ``experts``."""

    @abstractmethod
    def _backward_flags(self, layer: int, experts: Experts, *, micro: int) -> Flags:
        """What the backward pass of ``micro`` needs of ``experts``."""

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
    """The accesses to experts that are not trained: a pass needs weights, and leaves nothing behind."""

    def __init__(self, schedule: Schedule, predictor: Predictor) -> None:
        super().__init__(schedule, predictor)
        self._askers: Mapping[int, int] = {}

    def begin_evaluation(self) -> None:
        """Only forward passes follow, until the next ``begin_micro``."""
        super().begin_evaluation()
        self._askers = {}

    def tell_askers(self, askers: Mapping[int, int]) -> None:
        """Sets the sequences that request each expert in the next forward pass, a bit each (``Need.FIRST_ASKER``)."""
        self._askers = askers

    def forward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A forward pass, or its recomputation."""
        chosen = np.asarray(experts, np.uint32)
        again, ahead = self._forward_pass(layer, chosen)
        access = self._access(Phase.FORWARD, layer, chosen, ahead)
        if self._askers:
            masks = [self._askers.get(expert, 0) for expert in chosen.tolist()]
            access.flags[:] |= np.array(masks, np.uint16) * np.uint16(Need.FIRST_ASKER)
            self._askers = {}
        yield access
        if not again:
            self._predictor.observe(layer, chosen.tolist())

    def backward(self, layer: int, experts: Sequence[int] | Experts) -> Iterator[Access]:
        """A backward pass: gradients flow through the experts, and none of theirs is made."""
        ahead = self._ahead(Phase.BACKWARD, layer)
        yield self._access(Phase.BACKWARD, layer, np.asarray(experts, np.uint32), ahead)

    def done(self, access: Access, requests: Sequence[int] | npt.NDArray[np.uint32]) -> None:
        """Nothing: there were no actions."""

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
        """The norm is known: the kept gradients are pending."""
        for state in self._gradients.values():
            state[state == GradientState.KEPT] = GradientState.PENDING

    def discard(self) -> None:
        """The step is skipped: the kept gradients are dropped."""
        for state in self._gradients.values():
            state[:] = GradientState.NONE

    def gradient(self, layer: int, expert: int) -> GradientState:
        return GradientState(self._gradients[layer][expert])

    def kept(self) -> Iterator[tuple[int, int]]:
        """Layer and expert of every gradient that is kept or pending."""
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
        """A backward pass. In the last micro-batch another access follows, which finishes the gradients of experts that
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
        """After the last backward pass of a step whose count was not known: finishes the gradients that are kept."""
        for layer in reversed(self._gradients):
            left = np.flatnonzero(self._gradients[layer] == GradientState.KEPT)
            yield from self._rest(Phase.BACKWARD, layer, left, Need.GRADIENTS, Action.FINISH)

    def pending(self, layer: int | None = None) -> Iterator[Access]:
        """The steps of the pending gradients of ``layer`` (of all layers when None)."""
        for number in self._gradients if layer is None else [layer]:
            due = np.flatnonzero(self._gradients[number] == GradientState.PENDING)
            yield from self._rest(Phase.OPTIMIZER, number, due, Need.STEP_SPILLED, Action.STEP)

    def done(self, access: Access, requests: Sequence[int] | npt.NDArray[np.uint32]) -> None:
        """The actions of these requests of ``access`` (by their places in it) have been taken."""
        state = self._gradients[access.layer]
        experts, actions = access.experts[requests], access.actions[requests]
        state[experts[actions & Action.KEEP != 0]] = GradientState.KEPT
        state[experts[actions & Action.STEP != 0]] = GradientState.NONE

    # What passes need --------------------------------------------------------------------------------------

    @property
    def _is_last(self) -> bool:
        """Whether the present micro-batch's backward pass is the step's last."""
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
        """Those whose steps are queued up to the pass. Where nothing is replayed, an expert that the present step may still
        reach is none of them.
        """
        stepped, behind = self._due(ahead.layer, ahead.experts, later=ahead.later)
        changes = self._counts.replays or self._in_next_step(ahead.later)
        return ~(stepped | (behind & changes))

    def _in_next_step(self, later: int) -> bool:
        """Whether a pass, ``later`` cycles from now, comes after the present step has been applied."""
        return self._training and later > 0 and (self._is_last or self._schedule.interleaves)

    def _due(
        self, layer: int, experts: Experts, *, later: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Of a forward pass ``later`` cycles from now: whose gradients it steps first, and who is behind the steps then."""
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
        """An access beside the passes, if there is anything to do in it."""
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
        # What waited for the norm belongs to the step before the present one.
        step = self._counts.applied + (self._timing is StepTiming.IMMEDIATE)
        return Access(phase, layer, experts, flags, actions.astype(np.uint8), step, ahead)
