"""Open a store as a served model: ``open_running`` calls ``open_served`` and ``open_runner``.

Opening refuses a store that a trainer holds, a store of another number of ranks, and budgets that are too small before it
allocates memory. It never writes to the store, so several processes may serve it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tierstore._native import HugePages, StepClock
from tierstore.accelerator import has_own_memory, make_current, memory_errors, pinned, usable_bytes
from tierstore.capabilities import Capability
from tierstore.errors import ConfigError, StoreError
from tierstore.hf.spec import recorded_lora, recorded_spec
from tierstore.machine import MemoryAccount, allowed_bytes, memory, resident_bytes, return_freed_memory
from tierstore.machine_profile import ASSUMED, Cost, find_profile
from tierstore.model.config import ComputeDtype
from tierstore.model.interface import Model
from tierstore.model.spec import ModelSpec
from tierstore.model.store_schema import EXPERT_SCHEMA, PAIR_SCHEMA, TrainState, expert_key, pair_key
from tierstore.moe.guessing import RouterGuesses
from tierstore.moe.lora import LoraConfig, PairShape
from tierstore.moe.products import slow_products
from tierstore.moe.source import ExpertSourceRef
from tierstore.parallel import Mesh, RankEnvironment, RankGroup, rank_device
from tierstore.parallel.layout import Layout
from tierstore.plan.papers import ExpertMemorySizes, ServedLayers
from tierstore.prefetch.device_cache import find_records
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.prefetch.predictor import Predictor, PredictorName, make_predictor
from tierstore.prefetch.schedule import Schedule
from tierstore.serve.batch import BatchRunner, InvariantRunner, SequenceBits
from tierstore.serve.config import ExpertMemory, ServeConfig
from tierstore.serve.dense import compiled_blocks, load_dense, quicken_linears
from tierstore.serve.engine import ModelCounts, Running
from tierstore.serve.experts import (
    CachedExperts,
    GatedPredictor,
    MemoryChooser,
    Ring,
    SlottedExperts,
    settled_bytes,
)
from tierstore.serve.footprint import (
    ExpertBudget,
    ServedBudgets,
    ServedRecords,
    batch_bytes,
    check_memory,
    copies_weights,
    dense_parameter_bytes,
    fitted_context,
    served_account,
)
from tierstore.serve.language import open_language
from tierstore.serve.model import served_model
from tierstore.serve.passes import JointPasses, LockstepPasses
from tierstore.stats import OnProgress, StallLedger, no_progress
from tierstore.store.config import StoreAccess, StoreConfig
from tierstore.store.core import StoreCore
from tierstore.store.disk.home import rank_directories, rank_directory, read_identity
from tierstore.store.disk.lease import DirectoryLease
from tierstore.store.format import Group
from tierstore.store.optimizer import replay_scratch_bytes
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.reading import read_summary
from tierstore.tiers import DeviceSlots, WeightLoads, limited_tier, open_device_tier, weights_in_place
from tierstore.tiers.slots import DeviceKind
from tierstore.timeline import NullTimeline, OperationSpans, TimelineSink, open_timeline
from tierstore.train.setup import compute_deterministically, stall_spans
from tierstore.train.stored_model import stored_layout
from tierstore.units import format_bytes

_LOG = logging.getLogger("tierstore.serve")
#: Guesses are judged each time speculative reads of this many experts have proved useful or wasted.
_GATE_EXPERTS = 16
#: Seconds between the calls by which ranks without requests find out whether the others are alive.
_IDLE_S = 1.0
#: Most experts that routers guess of a layer at once, for each that a token chooses: those that most sequences are expected
#: to choose. A batch that reaches most experts of a layer keeps the disk busy anyway; more guesses would only evict experts
#: that the next step hits.
GUESSED_PER_CHOSEN = 3


@contextlib.contextmanager
def open_running(
    config: ServeConfig,
    mesh: Mesh | None = None,
    *,
    trace: Path | None = None,
    timeline: Path | None = None,
    populating: OnProgress = no_progress,
) -> Iterator[Running]:
    """Open the model in ``config.store`` for a ``ServingEngine``, on rank 0 of ``mesh``; the other ranks follow its runner.
    The file ``trace`` records the cache's decisions, the file ``timeline`` what the model waits for; ``populating`` is that
    of ``open_served``, which says what is raised.
    """
    with (
        open_timeline(timeline) as sink,
        open_served(config, mesh, trace=trace, timeline=sink, populating=populating) as parts,
    ):
        runner, language = open_runner(parts), open_language(parts.spec)
        yield Running(
            runner=runner,
            language=language,
            context=runner.model.context,
            counts=lambda: _counts(parts),
            account=parts.account(runner.model.context),
            lines=(*_lines(parts), *language.lines),
            idle_s=_IDLE_S if parts.mesh.world.size > 1 else None,
        )
        runner.end()
        parts.store.end_trace()


def _counts(parts: ServedParts) -> ModelCounts:
    residency = parts.store.cache.residency
    stats = residency.stats()
    return ModelCounts(
        hits=stats.hits,
        misses=stats.misses,
        mapped=parts.store.mapped.leases,
        mapped_bytes=parts.store.mapped.leased_bytes,
        moved_bytes={
            "nvme read": stats.read_bytes,
            "nvme read early": stats.prefetch_read_bytes,
            "wasted prefetch reads": stats.wasted_prefetch_bytes,
        },
        stall_s={
            cause.value: spent_ns / 1e9
            for cause, spent_ns in parts.ledger.totals(lambda key: key.cause).items()
        },
        pinned=sum(residency.state(int(entry)).pins > 0 for entry in residency.resident_entries()),
    )


def _lines(parts: ServedParts) -> tuple[str, ...]:
    config, spec = parts.config, parts.spec
    batch = "batch-invariant" if config.batch.invariant else "padded"
    if config.device_budget:
        device = format_bytes(config.device_budget)
    else:
        device = "all free memory" if has_own_memory(parts.device) else "part of the host budget"
    slow = slow_products(spec.compute_dtype.torch, parts.device)
    return (
        f"model: {len(spec.moe_layers)} layers of {spec.experts} experts, {spec.compute_dtype.value}, on {parts.device}",
        f"budget: {format_bytes(config.host_budget)} for experts on the host; on the device: {device}; batch of at "
        f"most {config.batch.sequences * parts.mesh.world.size} sequences, {batch}",
        *([] if parts.ranks_line is None else [parts.ranks_line]),
        *([slow] if slow else []),
        *(
            [f"policy of device slots: {config.cache.of_device.summary}"]
            if config.cache.device_policy
            else []
        ),
        f"cache policy: {config.cache.summary}; predictor: {config.prefetch.predictor.value}",
        *parts.store.describe(),
    )


# The model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ServedParts:
    """A model ready for forward passes. ``model`` is in evaluation mode; its dense parameters are complete on ``device``,
    without gradients; its experts are leased from ``experts``.
    """

    config: ServeConfig
    spec: ModelSpec
    model: Model
    #: The source that the layers call: it leases from ``experts``, or hands calls to its ``barrier`` while it has one.
    source: ExpertSourceRef
    experts: CachedExperts
    store: StoreCore
    ledger: StallLedger
    timeline: TimelineSink
    mesh: Mesh
    #: Bytes of memory that the process may take, and that it took before.
    allowed: int
    process: int

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def ranks_line(self) -> str | None:
        """What several ranks share; None for one."""
        if (ranks := self.mesh.world.size) == 1:
            return None
        return f"ranks: {ranks}, which share experts and sequences; budgets, memory and counts are per rank"

    def account(self, context: int) -> MemoryAccount:
        """What the process will hold with ``context`` tokens a sequence."""
        kind = DeviceKind.of(self.device.type)
        return served_account(self.config, self.spec, kind, process=self.process, context=context)


@contextlib.contextmanager
def open_served(
    config: ServeConfig,
    mesh: Mesh | None = None,
    *,
    trace: Path | None = None,
    timeline: TimelineSink | None = None,
    populating: OnProgress = no_progress,
) -> Iterator[ServedParts]:
    """Open the model in ``config.store``, imported or trained; close it at exit. ``trace`` records the cache's decisions,
    ``populating`` gets the bytes of the host cache that the kernel has given, and all.

    On several ranks (``mesh``) a collective: each has a part of the experts and of the batch; budgets are per rank. Raises
    StoreMissingError, StoreInUseError naming the process that writes the store, ConfigError (other ranks), BudgetError
    naming the minimum, CapabilityError, StoreError, ChecksumError, PeerError, OSError.
    """
    environment = RankEnvironment()
    mesh = mesh or Mesh.alone(environment, rank_device(config.device, environment))
    ranks, device = mesh.world.size, mesh.device
    directory = served_directory(config.store, mesh)
    if ranks > 1:
        config = _share(config, ranks)
    timeline = timeline or NullTimeline()
    make_current(device)
    timeline.follow(device)
    kind = DeviceKind.of(device.type)
    lower = "device_budget, batch.context or batch.sequences"
    with memory_errors(device, lower), contextlib.ExitStack() as stack:
        read_identity(directory)  # reports a missing store before the lease fails
        # While the lease is held, all readers below see the same commit.
        stack.enter_context(DirectoryLease(directory, access=StoreAccess.READ))
        stored = read_stored(config.store, mesh)
        spec = stored.spec
        if stored.records.pairs is not None and (name := _ring_key(config)):
            raise ConfigError(
                f"{name}: the experts of {directory} have LoRA pairs, which a ring does not support yet; "
                "merge them with tierstore deploy"
            )
        weights_in_place(config.weights_in_place, device, config.links.copy)  # raises if ON is impossible
        spec.import_code()
        process = resident_bytes()
        given = config.host_budget and not config.memory
        allowed = memory().usable_bytes if given else allowed_bytes(config.memory)
        if not (given or config.memory):
            allowed //= mesh.environment.local_world or ranks
        asked = ExpertBudget(config=config, spec=spec, records=stored.records, device=kind)
        if not config.host_budget:
            asked = asked.of(asked.within(allowed, process))
            config = asked.config
        budgets = asked.divided(free=_free_device_bytes(config, spec, device))
        check_memory(config.host_budget, dense_parameter_bytes(spec), kind, usable=allowed)
        if config.threads:
            torch.set_num_threads(config.threads)
        compute_deterministically(device)
        # Filling memory that is then overwritten changes no result, and costs time in each pass.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        ledger = StallLedger(listener=stall_spans(timeline) if timeline.enabled else None)
        source = ExpertSourceRef()
        model = spec.build(source, mesh=mesh if ranks > 1 else None, ledger=ledger)
        store_config = StoreConfig(
            host_budget=budgets.cache,
            lookahead=budgets.lookahead,
            layers=spec.moe_layers,
            cache=config.cache,
            io=config.io,
            disk=config.links.disk,
            clock=StepClock.STEPS,
        )
        store = ParameterStore.open(
            directory, store_config, access=StoreAccess.READ, trace=trace, populating=populating
        ).core
        stack.callback(store.close)
        holders = mesh.data if directory != config.store else RankGroup.alone()
        load_dense(store, model, stored.state, group=holders, compute=spec.compute_dtype.torch, device=device)
        model.module.requires_grad_(False).eval()
        if config.graphs.compile is Capability.OFF:
            quicken_linears(model.module)  # the compiler generates its own products
        return_freed_memory()
        stack.enter_context(pinned(store.arena, device, config.pinned_memory))
        opening = _ExpertOpening(stack, config, stored, budgets, store, mesh, ledger, timeline)
        experts = opening.slotted() if opening.copied and stored.records.pairs is None else opening.cached()
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
            mesh=mesh,
            allowed=allowed,
            process=process,
        )


def _free_device_bytes(config: ServeConfig, spec: ModelSpec, device: torch.device) -> int | None:
    """Bytes of an accelerator that experts may take: free memory less a reserve, the dense parameters, and the keys and
    values of ``batch`` (half of the rest if ``batch.context`` is 0). None on a CPU.
    """
    if not has_own_memory(device):
        return None
    free, batch = usable_bytes(device) - dense_parameter_bytes(spec), config.batch
    if not batch.context:
        return free // 2
    return free - batch_bytes(spec, batch.sequences, batch.context)


def open_runner(parts: ServedParts) -> BatchRunner:
    """Create a ``BatchRunner`` over ``parts``; on several ranks a collective.

    If ``batch.context`` is 0, the context is the model's limit, or less if ``batch.sequences`` such sequences do not fit in
    memory. Raises ConfigError for a context beyond the model's limit, BudgetError for one that does not fit.
    """
    config = parts.config
    model = served_model(parts.model, context=config.batch.context)
    own = has_own_memory(parts.device)

    def needed(context: int) -> int:
        if own:
            return batch_bytes(parts.spec, config.batch.sequences, context)
        return parts.account(context).nbytes

    allowed = usable_bytes(parts.device) if own else parts.allowed
    model.context = fitted_context(needed, config.batch, longest=model.context, allowed=allowed)
    world, apart = parts.mesh.world, config.batch.invariant
    passes, told = LockstepPasses(parts.source), config.cache.tells_sequences_apart
    if world.size > 1:
        model.context = min(world.all_gather_object(model.context))
        # A rank does not know which sequences of the others request its experts.
        passes, told = JointPasses(parts.source, world, model.forward_empty, apart=apart), False
    kind = InvariantRunner if apart else BatchRunner
    return kind(
        model,
        parts.experts,
        passes,
        sequences=config.batch.sequences * world.size,
        device=parts.device,
        requesters=SequenceBits() if told else None,
        ranks=world,
        timeline=parts.timeline,
        operations=OperationSpans(parts.store.engine, parts.timeline),
    )


# The store --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ServedStore:
    """The model of a store, as its last commit describes it."""

    state: TrainState
    spec: ModelSpec
    lora: LoraConfig
    records: ServedRecords
    #: The number of expert records that have missed steps.
    missed_records: int


def served_directory(store: Path, mesh: Mesh) -> Path:
    """The directory that this rank opens: its own in a store of as many ranks as ``mesh`` has; the store of one rank, which
    any number of ranks share. Raises ConfigError for a store of another number of ranks.
    """
    several, ranks = len(rank_directories(store)), mesh.world.size
    if several and not several == ranks > 1:
        raise ConfigError(
            f"{store}: holds the stores of several ranks; start {several} with torchrun, or merge them with tierstore "
            "deploy or tierstore reshard"
        )
    return rank_directory(store, mesh.world.rank, several or 1)


def _ring_key(config: ServeConfig) -> str:
    """The key that asks for a ring; empty if none does."""
    if config.ring.memory is ExpertMemory.RING:
        return "ring.memory"
    return "ring.layers" if config.ring.layers else ""


def _share(config: ServeConfig, ranks: int) -> ServeConfig:
    """The configuration of one of several ``ranks``. Raises ConfigError for what they do not support."""
    if name := _ring_key(config):
        raise ConfigError(f"{name}: not supported on several ranks; leave it out, or serve with one")
    if config.graphs.compile is not Capability.OFF:
        raise ConfigError("graphs.compile: not supported on several ranks; expected off")
    return replace(
        config,
        batch=replace(config.batch, sequences=-(-config.batch.sequences // ranks)),
        ring=replace(config.ring, memory=ExpertMemory.SPARSE),
    )


def read_stored(store: Path, mesh: Mesh | None = None) -> ServedStore:
    """Read the description of a store's model, but no weights. The model is imported, with LoRA pairs if some were trained,
    or the built-in one. On several ranks (``mesh``) a collective. Raises ConfigError (other ranks), StoreError,
    StoreFormatError, PeerError.
    """
    mesh = mesh or Mesh.alone(RankEnvironment(), torch.device("cpu"))
    ranks, directory = mesh.world.size, served_directory(store, mesh)
    summary = read_summary(directory)
    state = TrainState.unpack(summary.state, where=str(directory))
    if state.ranks > 1 and (
        directory == store or stored_layout(state, where=str(directory)) != Layout(1, 1, ranks, 1)
    ):
        raise ConfigError(
            f"{directory}: made by {state.ranks} ranks; make one store of it with tierstore deploy or tierstore reshard"
        )
    spec, lora = recorded_spec(store, state), recorded_lora(store, state)
    if ranks > 1:
        owners = spec.experts if spec.moe_layers else 1
        if ranks > owners:
            raise ConfigError(
                f"{store}: expected at most {owners} ranks, one for each expert of a layer, got {ranks}"
            )
        steps = mesh.world.all_gather_object(state.position)
        if len(set(steps)) > 1:
            raise StoreError(
                f"{store}: the ranks' stores are at different steps, {steps}; resume the run that made them"
            )
    experts = summary.schema(EXPERT_SCHEMA)
    if experts is None:
        raise StoreError(f"{directory}: the store holds no experts")
    records = ServedRecords(
        experts=experts,
        pairs=summary.schema(PAIR_SCHEMA) if lora.enabled and lora.experts else None,
        scratch=sum(replay_scratch_bytes(kept) for kept in summary.schemas if summary.missed.get(kept.name)),
        ranks=ranks,
    )
    return ServedStore(
        state=state,
        spec=spec,
        lora=lora,
        records=records,
        missed_records=summary.missed.get(EXPERT_SCHEMA, 0),
    )


# Experts ----------------------------------------------------------------------------------------------------


def served_predictor(config: ServeConfig, spec: ModelSpec, owned: range) -> Predictor:
    """Create the predictor that ``config`` names, for the experts ``owned`` of each layer of ``spec``."""
    most = config.prefetch.guesses
    if not most and config.prefetch.predictor is PredictorName.ROUTER:
        most = GUESSED_PER_CHOSEN * spec.architecture.top_k
    return make_predictor(config.prefetch.predictor, owned, most=most)


@dataclass(frozen=True)
class _ExpertOpening:
    """Opens the source of a model's experts over ``store``, which is open for reading; ``stack`` closes it.

    Raises BudgetError, CapabilityError, OSError.
    """

    stack: contextlib.ExitStack
    config: ServeConfig
    stored: ServedStore
    budgets: ServedBudgets
    store: StoreCore
    mesh: Mesh
    ledger: StallLedger
    timeline: TimelineSink

    @property
    def owned(self) -> range:
        """The experts of each layer that are on this rank."""
        return self.mesh.blocks(self.stored.spec.experts).owned(self.mesh.expert.rank)

    @property
    def copied(self) -> bool:
        """Whether experts are copied to device slots."""
        return copies_weights(self.config, DeviceKind.of(self.mesh.device.type))

    def cached(self) -> CachedExperts:
        """Experts leased from the host cache. If they have LoRA pairs, a pass over a layer first copies the pairs that it
        needs to memory outside the budgets, then leases the experts.
        """
        spec, slots, pairs = self.stored.spec, self.budgets.slots, self.budgets.pairs
        residency = self.store.cache.residency
        predictor = served_predictor(self.config, spec, self.owned)
        if pairs is None:
            window = _GATE_EXPERTS * self.stored.records.experts.layout(Group.WEIGHTS).slot_bytes
            gate = GatedPredictor(predictor, partial(settled_bytes, residency), window=window)
            return CachedExperts(self._frozen(slots, expert_key, gate), residency, gate)
        leased = LoraExperts(
            self._frozen(slots, expert_key, predictor),
            self._frozen(pairs, pair_key, served_predictor(self.config, spec, self.owned)),
            PairShape.of(spec.expert_shape, self.stored.lora),
            device=self.mesh.device,
        )
        return CachedExperts(leased, residency)

    def slotted(self) -> SlottedExperts:
        """Experts in device slots: a ring of whole layers, or chosen experts."""
        config, spec, schema = self.config, self.stored.spec, self.stored.records.experts
        slots, prefetch, link = self.budgets.slots, config.prefetch, config.links.copy
        predictor = served_predictor(config, spec, self.owned)
        frozen = self._frozen(slots, expert_key, predictor)
        layers = config.ring.layers or min(len(spec.moe_layers), slots.weights // spec.experts)
        count = 0 if config.ring.memory is ExpertMemory.SPARSE else layers
        ring = None
        if count:
            ring = Ring(
                frozen,
                spec.moe_layers,
                spec.experts,
                count=count,
                done=self.store.engine.done,
                depth=prefetch.depth,
                timeline=self.timeline,
            )
        architecture = spec.architecture
        chooser = MemoryChooser(
            asked=config.ring.memory,
            model=ServedLayers(
                layers=len(spec.moe_layers),
                experts=spec.experts,
                top_k=architecture.top_k,
                expert_numel=architecture.expert_numel,
                expert_bytes=slots.weight_bytes,
                dense_numel=sum(unit.matrices for unit in architecture.units)
                // max(len(architecture.units), 1),
            ),
            sizes=ExpertMemorySizes(
                device=slots.weights,
                host=self.budgets.cache // schema.layout(Group.WEIGHTS).slot_bytes,
                ring_layers=count,
            ),
            profile=ASSUMED if config.ring.profile is None else find_profile(config.ring.profile),
            copy=Cost(link.latency, link.bandwidth or math.inf) if link.on else None,
        )
        return SlottedExperts(
            frozen, self.store.cache.residency, ring, predictor=predictor, chooser=chooser, say=_LOG.info
        )

    def _frozen(
        self, budget: DeviceSlots[ComputeDtype], key: Callable[[int, int], str], predictor: Predictor
    ) -> FrozenExperts:
        """The records ``key`` in a device tier of their own with the slots of ``budget``."""
        slots = budget.computing(budget.compute.torch)
        loads = WeightLoads.COPIED if self.copied else WeightLoads.IN_PLACE
        pinning, engine, device = self.config.pinned_memory, self.store.engine, self.mesh.device
        opened = open_device_tier(engine, slots, device, HugePages.AUTO, loads, pinning, self.timeline)
        self.stack.callback(opened.close)
        layers = self.stored.spec.moe_layers
        return FrozenExperts(
            self.store,
            limited_tier(opened, engine, self.config.links.copy),
            find_records(self.store, layers, self.owned, key),
            predictor=predictor,
            schedule=Schedule.of_layers(layers, depth=self.config.prefetch.depth),
            ledger=self.ledger,
        )
