"""Ring memory or chosen experts: which one the next pass has.

The choice follows from the configuration, the number of tokens and what earlier passes asked for: it never looks at a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierstore.errors import BudgetError
from tierstore.machine_profile import ASSUMED, Cost, Profile
from tierstore.plan.ring import ExpertMemorySizes, PassFacts, PassTimes, ServedLayers, pass_times
from tierstore.serve.config import ExpertMemory
from tierstore.serve.experts.interface import ServingPhase
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


@dataclass(frozen=True)
class MemoryChoice:
    """RING or SPARSE, and why."""

    memory: ExpertMemory
    reason: str

    def describe(self) -> str:
        return f"experts on the device: {self.memory.value} ({self.reason})"


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

    def choose(self, phase: ServingPhase, tokens: int, counts: PhaseCounts) -> MemoryChoice:
        """For a pass of ``tokens`` tokens, where earlier passes of ``phase`` have counted ``counts``."""
        if self.asked is not ExpertMemory.AUTO:
            return MemoryChoice(self.asked, "as configured")
        if self.sizes.ring_layers < 1:
            return MemoryChoice(
                ExpertMemory.SPARSE,
                f"auto: {self.sizes.device} slots cannot hold the {self.model.experts} experts of a layer",
            )
        if self.sizes.ring_layers >= self.model.layers:
            return MemoryChoice(ExpertMemory.RING, "auto: the device holds all experts")
        times = pass_times(self.model, self.sizes, counts.facts(tokens), self.profile, self.copy)
        memory = ExpertMemory.RING if times.ring_is_faster else ExpertMemory.SPARSE
        return MemoryChoice(memory, self._reason(phase, tokens, times))

    def _reason(self, phase: ServingPhase, tokens: int, times: PassTimes) -> str:
        assert times.ring_s is not None
        return (
            f"auto: {phase.value} of {tokens} tokens reaches about {times.distinct:.0f} of {self.model.experts} experts "
            f"of a layer; a pass takes {format_seconds(times.ring_s)} with a ring of {self.sizes.ring_layers} of "
            f"{self.model.layers} layers and {format_seconds(times.sparse_s)} without ({self.profile.evidence.value})"
        )
