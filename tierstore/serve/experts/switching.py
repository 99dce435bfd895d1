"""Experts of a served model on a device with memory of its own: ring memory and chosen experts, in turns.

Both use the same slots. A pass has one of them from its beginning to its end. When the ring gives way, what it holds is what
chosen experts start with; when it comes back it starts empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tierstore.moe.source import ExpertLease
from tierstore.plan.ring import distinct_experts
from tierstore.prefetch.predictor import Counts, Predictor
from tierstore.prefetch.program import FrozenProgram, GuessCounts
from tierstore.serve.config import ExpertMemory
from tierstore.serve.experts.choosing import MemoryChoice, MemoryChooser, PhaseCounts
from tierstore.serve.experts.interface import ServingPhase
from tierstore.serve.experts.ring import Ring
from tierstore.serve.experts.slots import ExpertSlots
from tierstore.serve.experts.sparse import ChosenExperts


class SlottedExperts:
    """``ServedExperts`` in device slots. ``ring``: None where the device cannot hold a layer.

    ``say`` is given a line for each change between the two.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        chosen: ChosenExperts,
        ring: Ring | None,
        *,
        program: FrozenProgram,
        predictor: Predictor,
        chooser: MemoryChooser,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._slots = slots
        self._chosen = chosen
        self._ring = ring
        self._program = program
        self._predictor = predictor
        self._chooser = chooser
        self._say = say
        self._counts = {phase: PhaseCounts() for phase in ServingPhase}
        self._phase, self._tokens = ServingPhase.PREFILL, 0
        #: What passes have now, and why; None before the first.
        self.choice: MemoryChoice | None = None

    # Passes -------------------------------------------------------------------------------------------------

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        """A forward pass of ``tokens`` tokens in all begins; one that was not completed is given up."""
        self._chosen.abandon()
        self._chosen.end_step()  # to policies and in traces each pass is a step
        self._slots.end_step()
        self._program.begin_evaluation()
        self._phase, self._tokens = phase, tokens
        choice = self._chooser.choose(phase, tokens, self._counts[phase])
        if self.choice is None or choice.memory is not self.choice.memory:
            self._change(choice)
            self.choice = choice
            self._say(choice.describe())

    def tell_askers(self, askers: Mapping[int, int]) -> None:
        """Of the layer that comes next: the sequences that ask for each expert, a bit each. The slots' policy hears it; that
        of the host cache behind them does not.
        """
        self._program.tell_askers(askers)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` (ascending). Raises ChecksumError, OSError, BudgetError."""
        counts, model = self._counts[self._phase], self._chooser.model
        if self.choice is None:  # nobody has said what begins
            self.begin(self._phase, 1)
        if self._tokens:
            counts.asked += len(experts)
            counts.expected += distinct_experts(model.experts, model.top_k, self._tokens)
        if self._ring is not None and self._memory is ExpertMemory.RING:
            yield from self._ring.forward(layer, experts)
            self._predictor.observe(layer, experts)
            return
        chosen = self._chosen
        before = chosen.asked, chosen.found, chosen.guessed
        yield from chosen.forward(layer, experts)
        counts.sparse_asked += chosen.asked - before[0]
        counts.resident += chosen.found - before[1]
        counts.guessed += chosen.guessed - before[2]

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """As ``forward``: gradients flow through the experts, and none of theirs is made."""
        return self.forward(layer, experts)

    # Guesses ------------------------------------------------------------------------------------------------

    def reach(self, layer: int) -> list[int]:
        """The layers that guesses are wanted of; a ring needs none."""
        return [] if self._memory is ExpertMemory.RING else self._program.reach(layer)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        """For the hidden states that ``source`` starts from, the router of ``layer`` chooses each expert so many times."""
        self._program.offer(source, layer, chosen_E)

    @property
    def guesses(self) -> GuessCounts:
        """How its passes were guessed."""
        return self._program.guesses

    @property
    def late_prefetch_bytes(self) -> int:
        """Bytes that were on their way, but not there, when they were needed."""
        return self._slots.late_bytes

    # What it is ---------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """What the device holds now, and why; nothing before the first pass."""
        return [] if self.choice is None else [self.choice.describe()]

    @property
    def _memory(self) -> ExpertMemory | None:
        return None if self.choice is None else self.choice.memory

    def _change(self, choice: MemoryChoice) -> None:
        if self._ring is None:
            return
        if choice.memory is ExpertMemory.RING:
            self._chosen.clear()
            self._slots.cancel_prefetch()
        elif self.choice is not None:
            held = {layer: self._ring.slots_of(group) for layer, group in self._ring.held.items()}
            self._ring.clear()
            self._chosen.adopt(held)
