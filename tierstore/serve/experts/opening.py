"""Opening what a served model leases its experts from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from tierstore._native import HugePages
from tierstore.model.spec import ModelSpec
from tierstore.moe.source import ExpertLease
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.predictor import Counts, make_predictor
from tierstore.prefetch.program import GuessCounts
from tierstore.prefetch.schedule import Schedule
from tierstore.prefetch.walking import RecordsByExpert
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts.interface import ServedExperts, Stage
from tierstore.serve.footprint import served_budgets
from tierstore.stats import StallLedger
from tierstore.store.core import StoreCore
from tierstore.tiers import DeviceSlots, WeightLoads, limited_tier, open_device_tier, weights_in_place
from tierstore.timeline import TimelineSink
from tierstore.train.budgets import EXPERT_SCHEMA, DeviceKind


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
    schema = store.extents.schemas[store.records.schema_index(EXPERT_SCHEMA)]
    budgets = served_budgets(config, spec, schema, DeviceKind(device.type), scratch=store.scratch_bytes)
    slots = DeviceSlots(schema.numel, spec.compute_dtype.torch, budgets.slots.weights, 0)
    in_place = weights_in_place(config.weights_in_place, device, config.links.copy)
    loads = WeightLoads.IN_PLACE if in_place else WeightLoads.COPIED
    tier = open_device_tier(store.engine, slots, device, HugePages.AUTO, loads)
    stack.callback(tier.close)
    frozen = FrozenExperts(
        store,
        limited_tier(tier, store.engine, config.links.copy),
        records,
        weight_slots=slots.weights,
        predictor=make_predictor(
            config.prefetch.predictor, range(spec.experts), most=config.prefetch.guesses
        ),
        schedule=Schedule.of_layers(spec.moe_layers, depth=config.prefetch.depth),
        ledger=ledger,
    )
    return CachedExperts(frozen)


class CachedExperts:
    """Experts leased from the host cache through a few slots of the device (``ServedExperts``)."""

    def __init__(self, frozen: FrozenExperts) -> None:
        self._frozen = frozen
        #: The leases of the layer that was asked for last.
        self._leases: Iterator[ExpertLease] | None = None

    @property
    def guesses(self) -> GuessCounts:
        """How its passes were guessed."""
        return self._frozen.guesses

    @property
    def late_prefetch_bytes(self) -> int:
        """Bytes that were on their way, but not there, when they were needed."""
        return self._frozen.late_prefetch_bytes

    def begin(self, stage: Stage, tokens: int) -> None:
        """A forward pass begins. What an earlier one that raised has left open is ended."""
        self._end()
        self._frozen.begin_evaluation()

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
        return self._frozen.reach(layer)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        """The router of ``layer`` chooses each expert so many times, for what ``source`` starts from."""
        self._frozen.offer(source, layer, chosen_E)

    def _end(self) -> None:
        """Ends the access that is open, if any: a traceback may hold its iterator for long."""
        leases, self._leases = self._leases, None
        close = getattr(leases, "close", None)
        if close is not None:
            close()
