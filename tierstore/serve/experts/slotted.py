"""Experts of a served model on a device with memory of its own: chosen experts, and whole layers in a ring, in turns.

**Chosen experts** (the sparse case of SE-MoE section 3.2): the slots are a cache over the host cache. The same native core
decides which experts they hold (``Residency``, with a policy of the configuration), so that an expert that was used at the
last token is not copied again. Guesses are read into the host cache and copied to the device while the present layer
computes. Decisions come in program order.

**In turns**: the ring (``ring.py``) uses the same slots. A pass has one of the two from its beginning to its end. When the
ring gives way, chosen experts start with what it holds; when it comes back it starts empty. The choice follows from the
configuration, the number of tokens and what earlier passes requested: it never looks at a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.cache.access import GROUP_STRIDE, Need, Phase
from tierstore.cache.config import CacheConfig
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
from tierstore.prefetch.predictor import Counts, Predictor
from tierstore.prefetch.program import Access, Flags, FrozenProgram, GuessCounts, Speculation
from tierstore.serve.config import ExpertMemory
from tierstore.serve.experts import ServingPhase
from tierstore.serve.experts.ring import Ring
from tierstore.serve.experts.slots import Asked, ExpertSlots
from tierstore.units import format_bytes, format_seconds

_Decided = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]
_Fetch = Callable[[int, Sequence[int], Asked], None]
_FETCH, _EVICT = int(_native.Decision.FETCH), int(_native.Decision.EVICT)
_STORED = int(Need.WEIGHTS)


class ChosenExperts:
    """The experts of ``layers`` (``experts`` each) that passes of ``program`` ask for or guess, in the slots of ``slots``.

    ``lookahead``: slots that guesses may hold.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        layers: Sequence[int],
        experts: int,
        program: FrozenProgram,
        *,
        cache: CacheConfig,
        lookahead: int,
    ) -> None:
        if slots.count <= cache.headroom_frames:
            raise BudgetError(
                f"device_budget: {slots.count} slots cannot hold an expert beside the {cache.headroom_frames} that policy "
                f"{cache.policy} leaves empty"
            )
        self._slots = slots
        self._experts = experts
        self._program = program
        #: Each expert of the model is a record of one frame: its number is its layer's place x E + its own.
        self._residency = _native.Residency(
            slots.count,
            policy=cache.policy,
            policy_options=dict(cache.options),
            lookahead_frames=min(lookahead, slots.count - cache.headroom_frames - 1),
        )
        numbered = np.repeat(np.arange(len(layers), dtype=np.uint16), experts)
        self._residency.add_records(numbered, [1, 0, 0], [1, 0, 0], _STORED)
        self._layers = tuple(layers)
        self._place_of = {layer: place for place, layer in enumerate(layers)}
        self._slot_of: dict[int, int] = {}
        self._free = deque(range(slots.count))
        #: Experts that passes asked for, those of them that were in a slot, and those that had been guessed into one.
        self.asked = self.found = self.guessed = 0
        self._guesses: set[int] = set()

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` (ascending): those that the device has first, so that others are copied meanwhile."""
        for access in self._program.forward(layer, experts):
            yield from self._walk(access)

    def abandon(self) -> None:
        """A pass was not completed: its access ends, what it has not brought is not brought. Nothing if none was under
        way.
        """
        residency = self._residency
        if residency.group_open:
            residency.end_group()
        while residency.access_open:  # the groups that are left pass by, and their experts are forgotten
            _, demanded, ahead = residency.next_group()
            self._carry_out(demanded, self._nothing)
            self._carry_out(ahead, self._nothing)
            residency.end_group()
        lost = [number for number, slot in self._slot_of.items() if not self._slots.intact(slot)]
        self._drop(lost)

    def end_step(self) -> None:
        """A pass begins: to the policy each is a step."""
        self._residency.end_step()

    def clear(self) -> None:
        """The ring uses the slots from now on. What the policy has learned stays."""
        self._residency.cancel_prefetch()
        self._drop(list(self._slot_of))
        self._guesses.clear()

    def adopt(self, held: Mapping[int, range]) -> None:
        """The slots hold all experts of the layers of ``held`` in these slots, the layer that comes next first."""
        slot_of = {
            self._place_of[layer] * self._experts + expert: slot
            for layer, slots in held.items()
            for expert, slot in enumerate(slots)
            if self._slots.intact(slot)
        }
        taken = set(slot_of.values())
        self._free = deque(slot for slot in range(self._slots.count) if slot not in taken)
        for layer in reversed(list(held)):  # the nearest last: of equals it stays longest
            first = self._place_of[layer] * self._experts
            numbers = [number for number in range(first, first + self._experts) if number in slot_of]
            flags = np.full(len(numbers), _STORED, np.uint16)
            groups = self._begin(Phase.INIT, first // self._experts, np.array(numbers, np.uint32), flags)
            for _ in range(groups):
                _, demanded, ahead = self._residency.next_group()
                for decided in (demanded, ahead):
                    for number in self._evicted_and_fetched(decided):
                        self._slot_of[number] = slot_of[number]
                self._residency.end_group()
        self._residency.cancel_prefetch()

    # Walking ------------------------------------------------------------------------------------------------

    def _walk(self, access: Access) -> Iterator[ExpertLease]:
        place, count = self._place_of[access.layer], self._experts
        numbers = access.experts + np.uint32(place * count)
        known = {number for number in numbers.tolist() if number in self._slot_of}
        self.asked += len(numbers)
        self.found += len(known - self._guesses)
        self.guessed += len(known & self._guesses)
        self._guesses -= known
        groups = self._begin(access.phase, place, numbers, access.flags)
        if groups > 1:
            self._slots.prefetch(access.layer, [n % count for n in numbers.tolist() if n not in known])
        for group in range(groups):
            units, demanded, ahead = self._residency.next_group()
            self._carry_out(demanded, self._load, Asked.NOW)
            self._carry_out(ahead, self._load, Asked.AHEAD)
            if group == groups - 1:
                self._program.speculate(access, self._prefetch, self._cancel)
            there = set(numbers[units].tolist()) - set(demanded[1][demanded[0] == _FETCH] // GROUP_STRIDE)
            for unit in sorted(units.tolist(), key=lambda unit: int(numbers[unit]) not in there):
                slot = self._slot_of[int(numbers[unit])]
                yield ExpertLease(int(access.experts[unit]), self._slots.weights(slot, access.layer))
                self._slots.release(slot)
                self._residency.end_unit(unit)
            self._residency.end_group()
        self._program.done(access, range(len(numbers)))

    def _begin(self, phase: Phase, place: int, numbers: npt.NDArray[np.uint32], flags: Flags) -> int:
        groups, _ = self._residency.begin_access(phase, place, numbers, flags)
        return groups if len(numbers) else 0

    def _prefetch(self, ahead: Speculation) -> int:
        """Guesses: to the host cache, and from there to slots, as far as both take them."""
        place, count = self._place_of[ahead.layer], self._experts
        experts = ahead.experts.tolist()
        missing = [expert for expert in experts if place * count + expert not in self._slot_of]
        covered = self._slots.prefetch(ahead.layer, missing) if missing else 0
        if covered < len(missing):
            experts = [expert for expert in experts if expert < missing[covered]]
        numbers = np.array([place * count + expert for expert in experts], np.uint32)
        flags = np.full(len(numbers), _STORED, np.uint16)
        taken, decided = self._residency.prefetch(ahead.phase, place, numbers, flags)
        self._guesses.update(self._carry_out(decided, self._load, Asked.AHEAD))
        return taken

    def _cancel(self) -> None:
        self._residency.cancel_prefetch()
        self._slots.cancel_prefetch()

    # Slots --------------------------------------------------------------------------------------------------

    def _carry_out(self, decided: _Decided, fetch: _Fetch, asked: Asked = Asked.NOW) -> list[int]:
        """Gives slots to what is fetched, and fetches it; returns its numbers."""
        fetched = self._evicted_and_fetched(decided)
        by_layer: dict[int, list[int]] = {}
        for number in fetched:
            self._slot_of[number] = self._free.popleft()
            by_layer.setdefault(number // self._experts, []).append(number)
        for place, numbers in by_layer.items():
            fetch(place, numbers, asked)
        return fetched

    def _evicted_and_fetched(self, decided: _Decided) -> list[int]:
        """Frees the slots of what is evicted; returns the numbers of what is fetched."""
        fetched = []
        for kind, entry in zip(*(part.tolist() for part in decided), strict=True):
            number = entry // GROUP_STRIDE
            if kind == _FETCH:
                fetched.append(number)
            elif kind == _EVICT:
                self._guesses.discard(number)
                self._free.append(self._slot_of.pop(number))
        return fetched

    def _load(self, place: int, numbers: Sequence[int], asked: Asked) -> None:
        first = place * self._experts
        slots = [self._slot_of[number] for number in numbers]
        self._slots.load(self._layers[place], [number - first for number in numbers], slots, asked)

    def _nothing(self, place: int, numbers: Sequence[int], asked: Asked) -> None:
        """Nothing is loaded: the slots keep what they hold, and it is not used."""
        for number in numbers:
            self._slots.lose(self._slot_of[number])

    def _drop(self, numbers: Sequence[int]) -> None:
        """The device no longer has these, wherever it had them."""
        for number in numbers:
            self._free.append(self._slot_of.pop(number))
            self._residency.drop(np.array([number * GROUP_STRIDE], np.uint32))
            self._residency.set_stored(number, _STORED)


# In turns ---------------------------------------------------------------------------------------------------


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
            if self._ring is not None and choice.value is ExpertMemory.RING:
                self._chosen.clear()
                self._slots.cancel_prefetch()
            elif self._ring is not None and self.choice is not None:
                held = {layer: self._ring.slots_of(group) for layer, group in self._ring.held.items()}
                self._ring.clear()
                self._chosen.adopt(held)
            self.choice = choice
            self._say(choice.describe())

    def tell_askers(self, askers: Mapping[int, int]) -> None:
        """For the policy of the slots, not for that of the host cache behind them."""
        self._program.tell_askers(askers)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` (ascending). Raises ChecksumError, OSError, BudgetError."""
        counts, model = self._counts[self._phase], self._chooser.model
        if self.choice is None:  # no pass was begun
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
