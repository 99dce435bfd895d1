"""The sources from which a served model's experts are leased: the host cache, or slots of the device.

**Guesses**: reading a correct guess hides a wait; reading a wrong one costs disk time and space in the cache. Which prevails
depends on the model, its cache and the text. So the counters of the residency core decide: if less than half of the
speculated bytes whose outcome is known were used, guesses pause for some passes and are then tried again. The counters
depend only on the order of the program, and so do the decisions.

**Ring memory** (SE-MoE section 3.2): device slots that hold the experts of K of the N MoE layers. It controls the device's
cache (``DeviceCache``): when layer i has computed, its experts are given up, and those of the next layer that is not in the
ring are copied in the background. In consecutive passes that is layer i + K modulo N, so the first layers of the next token
are in the ring when it begins. With K = N all layers are resident and nothing moves::

    N = 5, K = 2      pass of layer:   0    1    2    3    4    0    1
    in the ring                        0 1  1 2  2 3  3 4  4 0  0 1  1 2
    copied when it has computed        2    3    4    0    1    2    3

Copies depend only on the order of passes. A skipped layer, or a pass that starts again after an error, is not a special
case: the ring then holds layers that are not next, and gives them up first.

**Chosen experts** (the sparse case of SE-MoE section 3.2): the slots are a cache over the host cache (``DeviceCache``), so
an expert that the last token used is not copied again. Guessed experts are read into the host cache and copied to the device
while the current layer computes.

**Alternation**: ring and chosen experts use the same slots, and each pass uses one of the two. Chosen experts start with
what the ring left in the slots; the ring starts empty. The choice depends on the configuration, the number of tokens and
the requests of earlier passes, never on a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from tierstore._native import Residency
from tierstore.cache.access import Need, Phase
from tierstore.decision import Decision
from tierstore.errors import BudgetError
from tierstore.machine_profile import ASSUMED, Cost, Profile
from tierstore.moe.source import ExpertLease
from tierstore.plan.papers import ExpertMemorySizes, PassFacts, ServedLayers, distinct_experts, pass_times
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.prefetch.predictor import Counts, Predictor
from tierstore.prefetch.program import Access, GuessCounts
from tierstore.serve.config import ExpertMemory
from tierstore.timeline import NullTimeline, TimelineSink, Track
from tierstore.units import format_bytes, format_seconds


class ServingPhase(Enum):
    """The phase of a forward pass."""

    PREFILL = "prefill"  # whole prompts, which reach most experts of a layer
    DECODE = "decode"  # one token of each sequence


#: The least share of speculated bytes that must be used: a wasted read costs what a used one saves.
LEAST_USED = 0.5


class GatedPredictor:
    """Guesses like ``inner``, or not at all (``Predictor``).

    ``settled``: the speculated bytes whose outcome is known, since the store was opened: used, and wasted. Each ``window``
    bytes of them are judged: if too few were used, the rest of the pass and ``pause`` more passes have no guesses.
    """

    def __init__(
        self, inner: Predictor, settled: Callable[[], tuple[int, int]], *, window: int, pause: int = 16
    ) -> None:
        self._inner, self._settled = inner, settled
        self._window, self._pause = window, pause
        self._since = settled()
        #: Passes left of a pause, including the current one.
        self._left = 0
        #: Whether the current pass has no guesses.
        self.closed = True

    def begin(self, *, read: bool) -> None:
        """Begin a forward pass. If the last one ``read`` nothing, all experts in use are in memory, and this pass skips
        guesses, which cost a router's product in each layer.
        """
        if self._left:
            self._left -= 1
            if not self._left:
                self._since = self._settled()
        self.closed = not read or self._left > 0

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        self._inner.observe(layer, experts)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        self._inner.offer(source, layer, chosen_E)

    def predict(self, layer: int) -> list[int]:
        """The guesses of ``inner``; none if nothing has to be read, or too little of what is read is used."""
        if self.closed:
            return []
        now = self._settled()
        used, wasted = (count - before for count, before in zip(now, self._since, strict=True))
        if used + wasted >= self._window:
            self._since = now
            if used < LEAST_USED * (used + wasted):
                self._left = self._pause + 1
                self.closed = True
                return []
        return self._inner.predict(layer)


def settled_bytes(residency: Residency) -> tuple[int, int]:
    """The counters of ``residency``, for ``GatedPredictor``."""
    stats = residency.stats()
    return stats.useful_prefetch_bytes, stats.wasted_prefetch_bytes


class CachedExperts:
    """Experts leased from the host cache, in place or through a few device slots (an ``ExpertSource`` and a
    ``GuessListener``).

    Call ``begin`` before each forward pass, also after one that raised, then ``forward`` in the order of the model's layers,
    some of which may be skipped.
    """

    def __init__(
        self, frozen: FrozenExperts | LoraExperts, residency: Residency, gate: GatedPredictor | None = None
    ) -> None:
        """``residency``: that of the host cache; ``gate``: the predictor of ``frozen``, if it may pause guesses."""
        self._frozen = frozen
        self._gate, self._residency = gate, residency
        self._begun = False
        #: The leases of the last requested layer.
        self._leases: Iterator[ExpertLease] | None = None
        #: Bytes that had been read when the last pass began; None before the first.
        self._read_bytes: int | None = None

    @property
    def late_prefetch_bytes(self) -> int:
        """Bytes that were being read ahead when they were needed."""
        return self._frozen.late_prefetch_bytes

    @property
    def guesses(self) -> GuessCounts:
        """Counts of the guesses for its passes."""
        return self._frozen.guesses

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        """Begin a forward pass of ``tokens`` tokens in all. Leases that a pass left open when it raised are closed."""
        self._end()
        if self._begun:
            self._residency.end_step()  # for policies and in traces each pass is a step
        self._begun = True
        if self._gate is not None:
            read_bytes = self._residency.stats().read_bytes
            self._gate.begin(read=read_bytes != self._read_bytes)
            self._read_bytes = read_bytes
        self._frozen.begin_evaluation()

    def set_requesters(self, requesters: Mapping[int, int]) -> None:
        """Tell the cache policy which sequences request each expert of the next layer, one bit each
        (``Need.FIRST_SEQUENCE``). In a prompt only last tokens count. Calling it is optional.
        """
        self._frozen.set_requesters(requesters)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Lease ``experts`` (ascending), those in memory first."""
        self._end()
        self._leases = self._frozen.forward(layer, experts)
        return self._leases

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """The same for a backward pass."""
        self._end()
        self._leases = self._frozen.backward(layer, experts)
        return self._leases

    def reach(self, layer: int) -> list[int]:
        closed = self._gate is not None and self._gate.closed
        return [] if closed else self._frozen.reach(layer)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        self._frozen.offer(source, layer, chosen_E)

    def _end(self) -> None:
        """Close the open access, if any: a traceback may keep its iterator alive for long."""
        leases, self._leases = self._leases, None
        close = getattr(leases, "close", None)
        if close is not None:
            close()


class Ring:
    """Holds the experts of ``count`` of ``layers`` (in the order of passes, ``experts`` each) in the slots of ``source``.

    ``depth``: number of layers beyond the ring that the host cache reads ahead. ``done``: whether a ticket has finished.
    """

    def __init__(
        self,
        source: FrozenExperts,
        layers: Sequence[int],
        experts: int,
        *,
        count: int,
        done: Callable[[int], bool],
        depth: int = 1,
        timeline: TimelineSink | None = None,
    ) -> None:
        slots = source.walk.slots.count
        if not 1 <= count <= len(layers) or count * experts > slots:
            raise BudgetError(
                f"ring.layers: expected 1 to {min(len(layers), slots // experts)} layers of {experts} experts in "
                f"{slots} slots, got {count}"
            )
        self._source, self._walk = source, source.walk
        self._layers = tuple(layers)
        self._experts = range(experts)
        self._count = count
        self._depth = depth
        self._done = done
        self._timeline = timeline or NullTimeline()
        #: The layers that are in the ring or being copied, the next one first.
        self.held: list[int] = []
        #: Layers whose copies are under way, when they began, and their tickets, for the timeline.
        self._refills: list[tuple[int, int, Sequence[int]]] = []

    def clear(self) -> None:
        """Empty all slots, for use by the ring."""
        for layer in self._layers:
            self._walk.give_up(layer)
        self.held.clear()
        self._refills.clear()

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Lease ``experts`` in order; when the last has been computed, the ring turns."""
        place = self._layers.index(layer)
        self._turn_to(place)
        begun = self._timeline.now()
        asked = np.array(experts, np.uint32)
        weights = np.full(len(asked), int(Need.WEIGHTS), np.uint16)
        for lease in self._source.lease(
            Access(Phase.FORWARD, layer, asked, weights, np.zeros(len(asked), np.uint8), step=0)
        ):
            yield lease
            self._draw()
        self._timeline.add(Track.COMPUTE, f"experts of layer {layer}", begun, self._timeline.now())
        self._turn_to(place + 1)

    def _turn_to(self, place: int) -> None:
        """Bring the layers from ``place`` on into the ring, nearest first."""
        total = len(self._layers)
        wanted = [self._layers[(place + ahead) % total] for ahead in range(self._count)]
        if self.held == wanted:
            return
        for stale in [layer for layer in self.held if layer not in wanted]:
            self._walk.give_up(stale)
        for layer in [layer for layer in wanted if layer not in self.held]:
            tickets = self._walk.bring(layer, self._experts)
            if self._timeline.enabled:
                self._refills.append((layer, time.monotonic_ns(), tickets))
        self.held = wanted
        for ahead in range(self._count, min(self._count + self._depth, total)):
            following = self._layers[(place + ahead) % total]
            if self._walk.prefetch(following, self._experts) < len(self._experts):
                return

    def _draw(self) -> None:
        """Add finished copies to the timeline; their end is the time of this call."""
        if not self._refills:
            return
        now = time.monotonic_ns()
        for refill in self._refills.copy():
            layer, start_ns, tickets = refill
            if all(map(self._done, tickets)):
                self._refills.remove(refill)
                name, args = f"layer {layer} into the ring", {"layer": layer}
                self._timeline.add(Track.RING, name, start_ns, now, args)


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
    """``CachedExperts`` in device slots. ``ring``: None if the device cannot hold a layer.

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
