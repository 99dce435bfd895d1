"""Experts of a served model on a device with memory of its own: ring memory and chosen experts, in turns.

Both use the same slots. A pass has one of them from its beginning to its end. When the ring gives way, chosen experts start
with what it holds; when it comes back it starts empty. Which one a pass has follows from the configuration, the number of
tokens and what earlier passes requested: the choice never looks at a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.decision import Decision
from tierstore.errors import BudgetError
from tierstore.machine_profile import ASSUMED, Cost, Profile
from tierstore.moe.source import ExpertLease
from tierstore.plan.papers import (
    ExpertMemorySizes,
    PassFacts,
    PassTimes,
    ServedLayers,
    distinct_experts,
    pass_times,
)
from tierstore.prefetch.predictor import Counts, Predictor
from tierstore.prefetch.program import FrozenProgram, GuessCounts
from tierstore.serve.config import ExpertMemory
from tierstore.serve.experts import ServingPhase
from tierstore.serve.experts.ring import Ring
from tierstore.serve.experts.slots import ExpertSlots
from tierstore.serve.experts.sparse import ChosenExperts
from tierstore.units import format_bytes, format_seconds


@dataclass(slots=True)
class PhaseCounts:
    """What the passes of one phase asked for. ``expected``: experts that an even router would have reached."""

    asked: int = 0
    expected: float = 0.0
    #: Of passes without a ring: experts asked for, those that the device had, and those that were on their way.
    sparse_asked: int = 0
    resident: int = 0
    guessed: int = 0

    def facts(self, tokens: int) -> PassFacts:
        missed = self.sparse_asked - self.resident
        return PassFacts(
            tokens=tokens,
            reached=self.asked / self.expected if self.expected else None,
            resident=self.resident / self.sparse_asked if self.sparse_asked else None,
            guessed=self.guessed / missed if missed else None,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryChooser:
    """Chooses for the passes of one model. ``copy``: of an expert to the device, where its link is limited.

    Raises BudgetError when it is made: a ring was asked for, and the device cannot hold a layer.
    """

    asked: ExpertMemory
    model: ServedLayers
    sizes: ExpertMemorySizes
    profile: Profile = field(default=ASSUMED)
    copy: Cost | None = None

    def __post_init__(self) -> None:
        if self.asked is ExpertMemory.RING and self.sizes.ring_layers < 1:
            least = self.model.experts * self.model.expert_bytes
            raise BudgetError(
                f"device_budget: {self.sizes.device} slots cannot hold the {self.model.experts} experts of a layer, and "
                f"ring.memory = ring needs one; the minimum is {least} bytes ({format_bytes(least)})"
            )

    def choose(self, phase: ServingPhase, tokens: int, counts: PhaseCounts) -> Decision[ExpertMemory]:
        """For a pass of ``tokens`` tokens, where earlier passes of ``phase`` have counted ``counts``."""
        if self.asked is not ExpertMemory.AUTO:
            return self._decided(self.asked, "as configured")
        if self.sizes.ring_layers < 1:
            return self._decided(
                ExpertMemory.SPARSE,
                f"auto: {self.sizes.device} slots cannot hold the {self.model.experts} experts of a layer",
            )
        if self.sizes.ring_layers >= self.model.layers:
            return self._decided(ExpertMemory.RING, "auto: the device holds all experts")
        times = pass_times(self.model, self.sizes, counts.facts(tokens), self.profile, self.copy)
        memory = ExpertMemory.RING if times.ring_is_faster else ExpertMemory.SPARSE
        return self._decided(memory, self._reason(phase, tokens, times))

    @staticmethod
    def _decided(memory: ExpertMemory, reason: str) -> Decision[ExpertMemory]:
        return Decision("experts on the device", memory, reason)

    def _reason(self, phase: ServingPhase, tokens: int, times: PassTimes) -> str:
        assert times.ring_s is not None
        return (
            f"auto: {phase.value} of {tokens} tokens reaches about {times.distinct:.0f} of {self.model.experts} experts "
            f"of a layer; a pass takes {format_seconds(times.ring_s)} with a ring of {self.sizes.ring_layers} of "
            f"{self.model.layers} layers and {format_seconds(times.sparse_s)} without ({self.profile.evidence.value})"
        )


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
        self.choice: Decision[ExpertMemory] | None = None

    # Passes -------------------------------------------------------------------------------------------------

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        """A forward pass of ``tokens`` tokens in all begins; one that was not completed is given up."""
        self._chosen.abandon()
        self._chosen.end_step()  # to policies and in traces each pass is a step
        self._slots.end_step()
        self._program.begin_evaluation()
        self._phase, self._tokens = phase, tokens
        choice = self._chooser.choose(phase, tokens, self._counts[phase])
        if self.choice is None or choice.value is not self.choice.value:
            self._change(choice)
            self.choice = choice
            self._say(choice.describe())

    def tell_askers(self, askers: Mapping[int, int]) -> None:
        """For the policy of the slots; that of the host cache behind them is not told."""
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
        self._program.offer(source, layer, chosen_E)

    @property
    def guesses(self) -> GuessCounts:
        return self._program.guesses

    @property
    def late_prefetch_bytes(self) -> int:
        return self._slots.late_bytes

    # What it is ---------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        return [] if self.choice is None else [self.choice.describe()]

    @property
    def _memory(self) -> ExpertMemory | None:
        return None if self.choice is None else self.choice.value

    def _change(self, choice: Decision[ExpertMemory]) -> None:
        if self._ring is None:
            return
        if choice.value is ExpertMemory.RING:
            self._chosen.clear()
            self._slots.cancel_prefetch()
        elif self.choice is not None:
            held = {layer: self._ring.slots_of(group) for layer, group in self._ring.held.items()}
            self._ring.clear()
            self._chosen.adopt(held)
