"""Opening what a served model leases its experts from."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from tierstore._native import HugePages, Residency
from tierstore.machine_profile import ASSUMED, Cost, load_profile
from tierstore.model.spec import ModelSpec
from tierstore.model.store_schema import EXPERT_SCHEMA
from tierstore.moe.source import ExpertLease
from tierstore.plan.ring import ExpertMemorySizes, ServedLayers
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.prefetch.predictor import Counts, Predictor
from tierstore.prefetch.program import FrozenProgram, GuessCounts
from tierstore.prefetch.schedule import Schedule
from tierstore.prefetch.walking import RecordsByExpert
from tierstore.serve.config import ExpertMemory, ServeConfig
from tierstore.serve.experts.choosing import MemoryChooser
from tierstore.serve.experts.gating import GatedPredictor, Settled, served_predictor
from tierstore.serve.experts.interface import ServedExperts, ServingPhase
from tierstore.serve.experts.ring import Ring
from tierstore.serve.experts.sizes import copies_weights, ring_layers
from tierstore.serve.experts.slots import ExpertSlots
from tierstore.serve.experts.sparse import ChosenExperts
from tierstore.serve.experts.switching import SlottedExperts
from tierstore.serve.footprint import served_budgets
from tierstore.stats import StallLedger
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.tiers import DeviceSlots, WeightLoads, limited_tier, open_device_tier
from tierstore.tiers.slots import DeviceKind
from tierstore.timeline import TimelineSink

_LOG = logging.getLogger("tierstore.serve")
#: Guesses are judged by the bytes of so many experts that were read for them.
_GATE_EXPERTS = 16


def open_experts(
    stack: contextlib.ExitStack,
    *,
    config: ServeConfig,
    store: StoreCore,
    spec: ModelSpec,
    device: torch.device,
    records: RecordsByExpert,
    ledger: StallLedger,
    timeline: TimelineSink,
) -> ServedExperts:
    """Experts of ``store``, which is open to read, as the layers of ``spec`` ask for them; ``records[layer][expert]`` says
    which record each is. ``stack`` closes what is opened. Raises BudgetError, CapabilityError, OSError.
    """
    kind = DeviceKind(device.type)
    schema = store.extents.schemas[store.records.schema_index(EXPERT_SCHEMA)]
    budgets = served_budgets(config, spec, schema, kind, scratch=store.scratch_bytes)
    slots = DeviceSlots(schema.numel, spec.compute_dtype.torch, budgets.slots.weights, 0, schema.quantized)
    predictor = served_predictor(config, spec)
    schedule = Schedule.of_layers(spec.moe_layers, depth=config.prefetch.depth)
    copied = copies_weights(config, kind)
    loads = WeightLoads.COPIED if copied else WeightLoads.IN_PLACE
    tier = open_device_tier(store.engine, slots, device, HugePages.AUTO, loads)
    stack.callback(tier.close)
    tier = limited_tier(tier, store.engine, config.links.copy)
    if not copied:
        gate = GatedPredictor(
            predictor,
            partial(_settled, store),
            window=_GATE_EXPERTS * schema.layout(Group.WEIGHTS).slot_bytes,
        )
        frozen = FrozenExperts(
            store,
            tier,
            records,
            weight_slots=slots.weights,
            predictor=gate,
            schedule=schedule,
            ledger=ledger,
        )
        return CachedExperts(frozen, store.cache.residency, gate)
    filled = ExpertSlots(store, tier, records, ledger=ledger)
    host_experts = budgets.cache // schema.layout(Group.WEIGHTS).slot_bytes
    return _slotted(config, spec, filled, host_experts, predictor, schedule, timeline)


def _slotted(
    config: ServeConfig,
    spec: ModelSpec,
    slots: ExpertSlots,
    host_experts: int,
    predictor: Predictor,
    schedule: Schedule,
    timeline: TimelineSink,
) -> SlottedExperts:
    """Experts in the slots of a device: a ring of whole layers, or those that are chosen."""
    program = FrozenProgram(schedule, predictor)
    sizes = ExpertMemorySizes(
        device=slots.count, host=host_experts, ring_layers=_ring_layers(config, spec, slots.count)
    )
    chosen = ChosenExperts(
        slots,
        spec.moe_layers,
        spec.experts,
        program,
        cache=config.cache,
        lookahead=int(slots.count * config.prefetch.budget) if config.prefetch.depth else 0,
    )
    ring = None
    if sizes.ring_layers:
        ring = Ring(
            slots,
            spec.moe_layers,
            spec.experts,
            count=sizes.ring_layers,
            depth=config.prefetch.depth,
            timeline=timeline,
        )
    chooser = _chooser(config, spec, sizes, slots.weight_bytes)
    return SlottedExperts(
        slots, chosen, ring, program=program, predictor=predictor, chooser=chooser, say=_LOG.info
    )


def _ring_layers(config: ServeConfig, spec: ModelSpec, slots: int) -> int:
    return 0 if config.ring.memory is ExpertMemory.SPARSE else ring_layers(config, spec, slots)


def _chooser(
    config: ServeConfig, spec: ModelSpec, sizes: ExpertMemorySizes, expert_bytes: int
) -> MemoryChooser:
    architecture, link = spec.architecture, config.links.copy
    dense = sum(unit.matrices for unit in architecture.units) // max(len(architecture.units), 1)
    return MemoryChooser(
        asked=config.ring.memory,
        model=ServedLayers(
            layers=len(spec.moe_layers),
            experts=spec.experts,
            top_k=architecture.top_k,
            expert_numel=architecture.expert_numel,
            expert_bytes=expert_bytes,
            dense_numel=dense,
        ),
        sizes=sizes,
        profile=ASSUMED if config.ring.profile is None else load_profile(config.ring.profile),
        copy=Cost(link.latency, link.bandwidth or math.inf) if link.on else None,
    )


def _settled(store: StoreCore) -> Settled:
    stats = store.cache.residency.stats()
    return Settled(stats.useful_prefetch_bytes, stats.wasted_prefetch_bytes)


class CachedExperts:
    """Experts leased from the host cache through a few slots of the device (``ServedExperts``)."""

    def __init__(
        self, frozen: FrozenExperts | LoraExperts, residency: Residency, gate: GatedPredictor | None = None
    ) -> None:
        """``residency``: of the host cache; ``gate``: what may pass over the guesses that ``frozen`` would take."""
        self._frozen = frozen
        self._gate, self._residency = gate, residency
        self._begun = False
        #: The leases of the layer that was asked for last.
        self._leases: Iterator[ExpertLease] | None = None
        #: What had been read when the last pass began; None before the first.
        self._read_bytes: int | None = None

    @property
    def guesses(self) -> GuessCounts:
        """How its passes were guessed."""
        return self._frozen.guesses

    @property
    def late_prefetch_bytes(self) -> int:
        """Bytes that were on their way, but not there, when they were needed."""
        return self._frozen.late_prefetch_bytes

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        """A forward pass begins. What an earlier one that raised has left open is ended."""
        self._end()
        if self._begun:
            self._residency.end_step()  # to policies and in traces each pass is a step
        self._begun = True
        if self._gate is not None:
            read_bytes = self._residency.stats().read_bytes
            self._gate.begin(read=read_bytes != self._read_bytes)
            self._read_bytes = read_bytes
        self._frozen.begin_evaluation()

    def tell_askers(self, askers: Mapping[int, int]) -> None:
        """Of the layer that comes next: the sequences that ask for each expert, a bit each."""
        self._frozen.tell_askers(askers)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` (ascending), those in memory first."""
        self._end()
        self._leases = self._frozen.forward(layer, experts)
        return self._leases

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """The same for a backward pass."""
        self._end()
        self._leases = self._frozen.backward(layer, experts)
        return self._leases

    def reach(self, layer: int) -> list[int]:
        """The layers that ``layer``'s forward pass, which comes next, would be told of by ``offer``."""
        closed = self._gate is not None and self._gate.closed
        return [] if closed else self._frozen.reach(layer)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        """The router of ``layer`` chooses each expert so many times, for what ``source`` starts from."""
        self._frozen.offer(source, layer, chosen_E)

    def describe(self) -> list[str]:
        """Where experts are computed with."""
        return [
            "experts on the device: computed with where they lie in the host cache; a ring would copy them there to no end"
        ]

    def _end(self) -> None:
        """Ends the access that is open, if any: a traceback may hold its iterator for long."""
        leases, self._leases = self._leases, None
        close = getattr(leases, "close", None)
        if close is not None:
            close()
