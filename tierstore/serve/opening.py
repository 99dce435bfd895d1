"""A store, opened read only, becomes a model whose experts are leased as its routers choose.

What can be refused is refused before memory is taken: a store that a trainer holds, one of several ranks, budgets that are
too small. Nothing of the store is ever written, and several processes may serve it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore._native import StepClock
from tierstore.capabilities import Capability
from tierstore.errors import ConfigError, StoreError
from tierstore.machine import memory
from tierstore.model.interface import Model
from tierstore.model.spec import ModelSpec
from tierstore.model.store_schema import EXPERT_SCHEMA, PAIR_SCHEMA, TrainState, expert_key
from tierstore.moe.guessing import RouterGuesses
from tierstore.moe.lora import LoraConfig
from tierstore.moe.source import SourceSlot
from tierstore.parallel import RankEnvironment, rank_device
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.config import ExpertMemory, ServeConfig
from tierstore.serve.experts.adapted import open_adapted
from tierstore.serve.experts.interface import ServedExperts
from tierstore.serve.experts.opening import open_experts
from tierstore.serve.footprint import (
    ServedBudgets,
    ServedFootprint,
    check_memory,
    served_budgets,
    served_footprint,
)
from tierstore.serve.graphs import compiled_blocks
from tierstore.serve.linears import quicken_linears
from tierstore.serve.weights import load_dense, served_lora, served_records, served_spec
from tierstore.stats import StallLedger
from tierstore.store.config import StoreAccess, StoreConfig
from tierstore.store.core import StoreCore
from tierstore.store.disk.home import rank_directories, read_identity
from tierstore.store.disk.lease import DirectoryLease
from tierstore.store.format import RecordSchema
from tierstore.store.optimizer import replay_scratch_bytes
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.reading import read_summary
from tierstore.tiers import weights_in_place
from tierstore.tiers.slots import DeviceKind
from tierstore.timeline import NullTimeline, TimelineSink
from tierstore.train.footprint import return_freed_memory
from tierstore.train.session import compute_deterministically, stall_spans


@dataclass(frozen=True, kw_only=True)
class ServedParts:
    """A model that is ready for forward passes. ``model`` is in evaluation mode, its dense parameters are whole on
    ``device``, without gradients; its experts come from ``experts``.
    """

    config: ServeConfig
    spec: ModelSpec
    model: Model
    #: Where the model's layers ask for experts: ``experts``, and for as long as there is one its ``meeting``.
    source: SourceSlot
    experts: ServedExperts
    store: StoreCore
    ledger: StallLedger
    timeline: TimelineSink
    device: torch.device
    footprint: ServedFootprint


@contextlib.contextmanager
def open_served(
    config: ServeConfig, *, trace: Path | None = None, timeline: TimelineSink | None = None
) -> Iterator[ServedParts]:
    """The model in ``config.store``, imported or trained, closed at exit. ``trace`` records the decisions of its cache.

    Raises StoreMissingError, StoreInUseError naming the process that writes the store, ConfigError (several ranks),
    BudgetError naming the minimum, CapabilityError, StoreError, ChecksumError, OSError.
    """
    directory = config.store
    _refuse_ranks(directory)
    timeline = timeline or NullTimeline()
    device = rank_device(config.device, RankEnvironment())
    kind = DeviceKind(device.type)
    with contextlib.ExitStack() as stack:
        read_identity(directory)  # a missing store is one, before its lease is
        # What is read of the store in several openings is of one commit.
        stack.enter_context(DirectoryLease(directory, access=StoreAccess.READ))
        stored = read_stored(directory)
        spec = stored.spec
        _refuse_ring(config, stored)
        # ON is refused where it cannot be.
        weights_in_place(config.weights_in_place, device, config.links.copy)
        budgets = served_budgets(
            config, spec, stored.experts, kind, scratch=stored.scratch, pairs=stored.pairs
        )
        footprint = served_footprint(config, spec, budgets, kind)
        check_memory(footprint, kind, usable=memory().usable_bytes)
        _configure_torch(config, device)
        ledger = StallLedger(listener=stall_spans(timeline) if timeline.enabled else None)
        source = SourceSlot()
        model = spec.build(source, ledger=ledger)
        store = _open_store(config, spec, budgets.cache, budgets.lookahead, trace)
        stack.callback(store.close)
        load_dense(store, model, stored.state, compute=spec.compute_dtype.torch, device=device)
        model.module.requires_grad_(False).eval()
        if config.graphs.compile is Capability.OFF:
            quicken_linears(model.module)  # the compiler makes products of its own
        return_freed_memory()
        experts = _open_experts(
            stack, config, stored, budgets, store=store, device=device, ledger=ledger, timeline=timeline
        )
        source.target = experts
        if config.prefetch.predictor is PredictorName.ROUTER and config.prefetch.depth:
            guesses = RouterGuesses(model.routers(), experts, frozen=spec.compute_dtype.torch)
            stack.callback(guesses.remove)
        if config.graphs.compile is not Capability.OFF:
            stack.enter_context(compiled_blocks(model, config))
        yield ServedParts(
            config=config,
            spec=spec,
            model=model,
            source=source,
            experts=experts,
            store=store,
            ledger=ledger,
            timeline=timeline,
            device=device,
            footprint=footprint,
        )


def _refuse_ranks(directory: Path) -> None:
    if rank_directories(directory):
        raise ConfigError(
            f"{directory}: has the stores of several ranks: tierstore deploy, or tierstore reshard, makes one store of it"
        )


def _refuse_ring(config: ServeConfig, stored: ServedStore) -> None:
    """Raises ConfigError where a ring is asked for, and experts have pairs."""
    if stored.pairs is not None and (config.ring.memory is ExpertMemory.RING or config.ring.layers):
        name = "ring.memory" if config.ring.memory is ExpertMemory.RING else "ring.layers"
        raise ConfigError(
            f"{name}: the experts of {config.store} have an adapter's pairs, which a ring does not hold yet; "
            "tierstore deploy merges them"
        )


@dataclass(frozen=True, kw_only=True)
class ServedStore:
    """What the last commit of a store says of its model."""

    state: TrainState
    spec: ModelSpec
    #: The records of experts, and of the pairs that were trained beside them; None where there are none.
    experts: RecordSchema
    lora: LoraConfig
    pairs: RecordSchema | None
    #: Bytes to replay missed steps in, and how many records of experts have some.
    scratch: int
    missed_records: int


def read_stored(directory: Path) -> ServedStore:
    """Reads no weights. Raises ConfigError (several ranks), StoreError, StoreFormatError."""
    summary = read_summary(directory)
    state = TrainState.unpack(summary.state, where=str(directory))
    spec = served_spec(directory, state)
    experts = summary.schema(EXPERT_SCHEMA)
    if experts is None:
        raise StoreError(f"{directory}: it holds no experts")
    lora = served_lora(directory, state)
    return ServedStore(
        state=state,
        spec=spec,
        experts=experts,
        lora=lora,
        pairs=summary.schema(PAIR_SCHEMA) if lora.enabled and lora.experts else None,
        scratch=sum(replay_scratch_bytes(kept) for kept in summary.schemas if summary.missed.get(kept.name)),
        missed_records=summary.missed.get(EXPERT_SCHEMA, 0),
    )


def _configure_torch(config: ServeConfig, device: torch.device) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    compute_deterministically(device)
    # Filling memory that is about to be written changes no result, and each token's pass allocates much.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _open_store(
    config: ServeConfig, spec: ModelSpec, cache: int, lookahead: int, trace: Path | None
) -> StoreCore:
    store_config = StoreConfig(
        host_budget=cache,
        lookahead=lookahead,
        layers=spec.moe_layers,
        cache=config.cache,
        io=config.io,
        disk=config.links.disk,
        clock=StepClock.STEPS,
    )
    return ParameterStore.open(config.store, store_config, access=StoreAccess.READ, trace=trace).core


def _open_experts(
    stack: contextlib.ExitStack,
    config: ServeConfig,
    stored: ServedStore,
    budgets: ServedBudgets,
    *,
    store: StoreCore,
    device: torch.device,
    ledger: StallLedger,
    timeline: TimelineSink,
) -> ServedExperts:
    """What the model's layers ask for experts: with their pairs, where any were trained."""
    spec = stored.spec
    if stored.pairs is None:
        return open_experts(
            stack,
            config=config,
            store=store,
            spec=spec,
            device=device,
            records=served_records(spec, store, expert_key),
            ledger=ledger,
            timeline=timeline,
        )
    return open_adapted(
        stack,
        config=config,
        store=store,
        spec=spec,
        lora=stored.lora,
        device=device,
        budgets=budgets,
        ledger=ledger,
    )
