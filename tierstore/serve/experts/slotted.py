"""A served model's experts in device slots: chosen experts, or whole layers in a ring.

**Chosen experts** (the sparse case of SE-MoE section 3.2): the slots are a cache over the host cache (``DeviceCache``), so
an expert that the last token used is not copied again. Guessed experts are read into the host cache and copied to the device
while the current layer computes.

**Alternation**: the ring (``ring.py``) uses the same slots, and each pass uses one of the two. Chosen experts start with
what the ring left in the slots; the ring starts empty. The choice depends on the configuration, the number of tokens and
the requests of earlier passes, never on a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tierstore._native import Residency
from tierstore.decision import Decision
from tierstore.errors import BudgetError
from tierstore.machine_profile import ASSUMED, Cost, Profile
from tierstore.moe.source import ExpertLease
from tierstore.plan.papers import (
    ExpertMemorySizes,
    PassFacts,
    ServedLayers,
    distinct_experts,
    pass_times,
)
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.predictor import Predictor
from tierstore.serve.config import ExpertMemory
from tierstore.serve.experts import ServingPhase
from tierstore.serve.experts.cached import CachedExperts
from tierstore.serve.experts.ring import Ring
from tierstore.units import format_bytes, format_seconds


@dataclass(slots=True)
class PhaseCounts:
    """Experts that the passes of one phase requested. ``expected``: experts that an even router would have reached."""

    asked: int = 0
    expected: float = 0.0
    #: In passes without a ring: experts requested, those the device kept from earlier passes, and those guessed into slots.
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
    """Chooses between a ring and chosen experts for each pass of a model. ``copy``: the cost of copying an expert to the
    device, if that link is limited.

    Raises BudgetError when created if the configuration asks for a ring and the device cannot hold a layer.
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
        """Choose for a pass of ``tokens`` tokens; ``counts`` are those of earlier passes of ``phase``."""
        ring, name = ExpertMemory.RING, "experts on the device"
        if self.asked is not ExpertMemory.AUTO:
            return Decision(name, self.asked, "as configured")
        if self.sizes.ring_layers < 1:
            reason = f"{self.sizes.device} slots cannot hold the {self.model.experts} experts of a layer"
            return Decision(name, ExpertMemory.SPARSE, f"auto: {reason}")
        if self.sizes.ring_layers >= self.model.layers:
            return Decision(name, ring, "auto: the device holds all experts")
        times = pass_times(self.model, self.sizes, counts.facts(tokens), self.profile, self.copy)
        assert times.ring_s is not None
        return Decision(
            name,
            ring if times.ring_is_faster else ExpertMemory.SPARSE,
            f"auto: {phase.value} of {tokens} tokens reaches about {times.distinct:.0f} of {self.model.experts} experts "
            f"of a layer; a pass takes {format_seconds(times.ring_s)} with a ring of {self.sizes.ring_layers} of "
            f"{self.model.layers} layers and {format_seconds(times.sparse_s)} without ({self.profile.evidence.value})",
        )


class SlottedExperts(CachedExperts):
    """``ServedExperts`` in device slots. ``ring``: None if the device cannot hold a layer.

    ``say`` receives a line at each change between ring and chosen experts.
    """

    def __init__(
        self,
        frozen: FrozenExperts,
        residency: Residency,
        ring: Ring | None,
        *,
        predictor: Predictor,
        chooser: MemoryChooser,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``residency``: that of the host cache; ``predictor``: that of ``frozen``."""
        super().__init__(frozen, residency)
        self._slots = frozen.walk.slots
        self._ring = ring
        self._predictor = predictor
        self._chooser = chooser
        self._say = say
        self._counts = {phase: PhaseCounts() for phase in ServingPhase}
        self._phase, self._tokens = ServingPhase.PREFILL, 0
        #: The current choice and its reason; None before the first pass.
        self.choice: Decision[ExpertMemory] | None = None

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        super().begin(phase, tokens)
        self._phase, self._tokens = phase, tokens
        choice = self._chooser.choose(phase, tokens, self._counts[phase])
        if self.choice is None or choice.value is not self.choice.value:
            if self._ring is not None and choice.value is ExpertMemory.RING:
                self._ring.clear()
            self.choice = choice
            self._say(choice.describe())

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Lease ``experts`` (ascending). Raises ChecksumError, OSError, BudgetError."""
        self._end()
        if self.choice is None:  # ``begin`` was not called
            self.begin(self._phase, 1)
        self._leases = self._in_turns(layer, experts)
        return self._leases

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """As ``forward``: gradients flow through the experts, whose own gradients are not computed."""
        return self.forward(layer, experts)

    def reach(self, layer: int) -> list[int]:
        """The layers to guess experts of; none with a ring."""
        return [] if self._rings else super().reach(layer)

    def _in_turns(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        counts, model, slots = self._counts[self._phase], self._chooser.model, self._slots
        if self._tokens:
            counts.asked += len(experts)
            counts.expected += distinct_experts(model.experts, model.top_k, self._tokens)
        if self._ring is not None and self._rings:
            yield from self._ring.forward(layer, experts)
            self._predictor.observe(layer, experts)
            return
        before = slots.asked, slots.found, slots.guessed
        yield from self._frozen.forward(layer, experts)
        counts.sparse_asked += slots.asked - before[0]
        counts.resident += slots.found - before[1]
        counts.guessed += slots.guessed - before[2]

    @property
    def _rings(self) -> bool:
        """Whether passes use the ring now."""
        return self.choice is not None and self.choice.value is ExpertMemory.RING
