"""Opens and closes a training session: store, model, dense parameters, experts, in that order.

``tierstore.train.setup`` has checked and refused beforehand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tierstore._native import HugePages, StepClock
from tierstore.accelerator import memory_errors, pinned
from tierstore.dense import DenseSlices, GatherDtype, UnitLayout, dense_schemas, unit_layouts
from tierstore.dense.gates import PassListener
from tierstore.dense.parameters import DividedParameters, Units, load_frozen
from tierstore.errors import ConfigError
from tierstore.machine import MemoryAccount, cores, require_space, return_freed_memory
from tierstore.model.config import CheckpointActivations, ComputeDtype
from tierstore.model.interface import Model
from tierstore.model.store_schema import EXPERT_SCHEMA, PAIR_SCHEMA, TrainState, expert_key, pair_key
from tierstore.model.transformer import Transformer
from tierstore.moe.guessing import RouterGuesses
from tierstore.moe.lora import PairShape
from tierstore.moe.low_rank import initial_pair
from tierstore.moe.source import Chunking, ExpertSource, ExpertSourceRef, JointSource, in_training
from tierstore.parallel import Mesh
from tierstore.parallel.config import Elastic
from tierstore.prefetch import HorizontalQueue, Schedule, unit_schedule
from tierstore.prefetch.device_cache import find_records
from tierstore.prefetch.experts import ExpertTiers, FrozenExperts, TieredExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.prefetch.plan import StepTiming, group_order
from tierstore.prefetch.predictor import Predictor, PredictorName, make_predictor
from tierstore.stats import Cause, OnProgress, no_progress
from tierstore.store.config import StoreConfig
from tierstore.store.core import StoreCore
from tierstore.store.disk.home import rank_directory, rank_stripe
from tierstore.store.disk.store_extents import extent_bytes
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.registering import NewRecord, register_many
from tierstore.tiers import (
    DeviceSlots,
    DeviceTier,
    WeightLoads,
    limited_tier,
    open_device_tier,
    weights_in_place,
)
from tierstore.timeline import NullTimeline, TimelineSink
from tierstore.train.boundaries import open_boundaries
from tierstore.train.budgets import expert_schema, pair_schema, trained_schema
from tierstore.train.chunk_control import ChunkControl, most_chunks
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import boundary_split
from tierstore.train.layer_order import LayerOrder
from tierstore.train.ranks import Opening
from tierstore.train.setup import Loop, Setup, prepare
from tierstore.train.stages import one_forward_one_backward
from tierstore.train.state import resumed_state
from tierstore.train.step_time import StepTimer, ThreadTimes, stolen_while_running
from tierstore.train.stepping import SessionParts, Stepper
from tierstore.train.task_data import TaskData
from tierstore.train.tasks import own_head_tasks, resumed
from tierstore.train.trainer import Trainer

#: The most threads that draw first weights. Each has an expert's in memory, and one thread writes what they draw, which
#: takes about as long.
_DRAWING = 4


@contextlib.contextmanager
def open_session(
    config: TrainConfig,
    opening: Opening,
    *,
    mesh: Mesh | None = None,
    trace: Path | None = None,
    timeline: TimelineSink | None = None,
    io_log: Path | None = None,
    accepted: Callable[[MemoryAccount], None] = lambda account: None,
    tokenising: OnProgress = no_progress,
    populating: OnProgress = no_progress,
    creating: OnProgress = no_progress,
) -> Iterator[Trainer]:
    """A trainer over ``config.store``. It is closed at exit in any case; uncommitted steps are lost.

    On several ranks (``mesh``) this is a collective, and each has a store of its own under ``config.store``. Budgets are
    per rank. When all checks have passed, before the first write, ``accepted`` gets what the process will hold.
    ``tokenising`` gets the bytes of documents that are tokenised, ``populating`` those of the host cache that the kernel
    has given, ``creating`` the experts that are created: those done, and all. Raises ConfigError, DataError, BudgetError,
    CapabilityError, StoreError, PeerError, OSError; on a failure nothing was created or changed.
    """
    with (
        open_parts(
            config,
            opening,
            loop=Loop.OWN,
            mesh=mesh,
            trace=trace,
            timeline=timeline,
            io_log=io_log,
            accepted=accepted,
            tokenising=tokenising,
            populating=populating,
            creating=creating,
        ) as parts,
        contextlib.closing(ThreadTimes()) as threads,
    ):
        assert parts.data is not None
        trainer = Trainer(parts, parts.data, StepTimer(parts.ledger, threads, stolen_while_running()))
        with contextlib.nullcontext() if trainer.stages is None else contextlib.closing(trainer.stages):
            yield trainer


class SessionWatch(Protocol):
    """Wraps the parts between a model and its session, to check that an external loop does everything in order."""

    def listener(self, queue: PassListener) -> PassListener:
        """The listener of passes over dense parameter groups, which forwards them to ``queue``."""
        ...

    def source(self, experts: JointSource) -> ExpertSource:
        """The model's expert source, backed by ``experts``; in layer order also a ``JointSource``."""
        ...


@contextlib.contextmanager
def open_parts(
    config: TrainConfig,
    opening: Opening,
    *,
    loop: Loop,
    watch: SessionWatch | None = None,
    mesh: Mesh | None = None,
    trace: Path | None = None,
    timeline: TimelineSink | None = None,
    io_log: Path | None = None,
    accepted: Callable[[MemoryAccount], None] = lambda account: None,
    tokenising: OnProgress = no_progress,
    populating: OnProgress = no_progress,
    creating: OnProgress = no_progress,
) -> Iterator[SessionParts]:
    """The parts of ``open_session``'s trainer, closed at exit; ``loop`` drives them."""
    setup = prepare(config, opening, loop, mesh, timeline or NullTimeline(), tokenising)
    config = setup.config
    accepted(setup.account)
    chunking = Chunking(setup.timeline)
    chunks = ChunkControl(config, setup.mesh, chunking)
    slot = ExpertSourceRef(chunking)
    lower = "device_budget, data.batch_size or model.seq_len"
    with memory_errors(setup.mesh.device, lower), contextlib.ExitStack() as stack:
        model, units, layouts = _build_model(setup, slot)
        store = _open_store(setup, layouts, populating, trace=trace, io_log=io_log)
        stack.callback(store.close)
        if (budget := store.write_budget) is not None:
            setup.ledger.divert(Cause.WRITE_BUDGET, lambda: budget.blocked_ns)
        state = _initial_state(setup, model, store, chunks)
        dense, schedule = _slice_dense(setup, model, units, layouts)
        queue = HorizontalQueue(schedule, dense, setup.ledger)
        gates = dense.attach(model, queue if watch is None else watch.listener(queue))
        stack.callback(dense.detach)
        _fill(setup, model, store, dense, creating)
        experts = _open_experts(setup, store, schedule, stack)
        slot.target = experts if watch is None else watch.source(experts)
        if config.prefetch.predictor is PredictorName.ROUTER and config.prefetch.depth:
            guesses = RouterGuesses(
                model.routers(),
                experts,
                mesh=setup.mesh,
                ledger=setup.ledger,
                training=partial(in_training, slot),
            )
            stack.callback(guesses.remove)
        layers: LayerOrder | None = None
        blocks = config.model.architecture.blocks
        if (split := boundary_split(config, setup.mesh.data.size, blocks)) is not None:
            boundaries = open_boundaries(
                store,
                setup.ledger,
                split,
                micro_batches=config.data.micro_batches,
                device=setup.mesh.device,
                pinning=config.pinned_memory,
            )
            stack.enter_context(boundaries)
            layers = LayerOrder(model, dense, queue, gates=gates, slot=slot, boundaries=boundaries)
        parts = SessionParts(
            **vars(setup),
            store=store,
            experts=experts,
            model=model,
            dense=dense,
            queue=queue,
            state=state,
            chunks=chunks,
            layers=layers,
        )
        if setup.agreed.opening is Opening.CREATE:
            # A store exists from its first commit on, so no rank makes that commit before all ranks have their records.
            setup.mesh.world.barrier()
            Stepper(parts).commit()
            return_freed_memory()
        yield parts


# The parts, in order ----------------------------------------------------------------------------------------


def _build_model(setup: Setup, slot: ExpertSourceRef) -> tuple[Model, Units, Sequence[UnitLayout]]:
    """The model, with experts from ``slot``; its dense parameters by group, and their division between ranks."""
    config, vocabulary = setup.config, setup.vocabulary
    spec = config.spec
    if config.data.layer_major:  # the step itself recomputes blocks
        spec = spec.vary("checkpoint_activations", CheckpointActivations.OFF) or spec
    model = spec.build(slot, mesh=setup.mesh, ledger=setup.ledger, vocabulary=vocabulary.partition)
    heads = model.add_heads(own_head_tasks(config.tasks)) if isinstance(model, Transformer) else {}
    units = model.dense_units()
    narrow = config.dense.gather is GatherDtype.COMPUTE
    if not narrow and any(parameter.dtype != torch.float32 for _, unit in units for parameter in unit):
        raise ConfigError(
            "dense.gather: expected compute: this model takes its parameters in bf16, and casts none itself"
        )
    layouts = unit_layouts(
        units,
        ranks=setup.mesh.data.size,
        narrow=model.cast_parameters(),
        fusion=config.dense.fusion,
        tables=vocabulary.tables,
        apart=heads,
    )
    return model, units, layouts


def _open_store(
    setup: Setup,
    layouts: Sequence[UnitLayout],
    populating: OnProgress,
    *,
    trace: Path | None,
    io_log: Path | None,
) -> StoreCore:
    config, agreed, world = setup.config, setup.agreed, setup.mesh.world
    directory = rank_directory(config.store, world.rank, world.size)
    store_config = StoreConfig(
        host_budget=setup.budgets.cache,
        lookahead=setup.budgets.lookahead,
        retain=config.retain,
        layers=config.model.moe_layers,
        cache=config.cache,
        io=config.io,
        disk=config.links.disk,
        group_order=group_order(replicas=setup.mesh.replicas, chunks=most_chunks(config, setup.mesh)),
        stripe=rank_stripe(config.stripe, world.rank, world.size),
        wear=config.wear,
        clock=StepClock.STEPS,
    )
    if agreed.opening is Opening.CREATE:
        experts = expert_schema(config)
        count = len(setup.owned) * len(config.model.moe_layers)
        needed = extent_bytes(experts, count, config.retain)
        # Before memory is taken, which can be long.
        require_space([directory, *store_config.stripe.directories], needed, "the experts' records")
        schemas = [experts, *dense_schemas(layouts)]
        return ParameterStore.create(
            directory,
            schemas,
            store_config,
            adamw=config.adamw,
            trace=trace,
            io_log=io_log,
            populating=populating,
        ).core
    pairs = pair_schema(config)
    # A run may add the records of pairs, trained beside frozen records, and a task's own head; the store has all other
    # schemas.
    further = [*([pairs] if pairs else []), *dense_schemas(layouts)]
    return ParameterStore.open(
        directory,
        store_config,
        adamw=config.adamw,
        at=agreed.at,
        further=further if config.lora.enabled or config.tasks else [],
        trace=trace,
        io_log=io_log,
        populating=populating,
    ).core


def _initial_state(setup: Setup, model: Model, store: StoreCore, chunks: ChunkControl) -> TrainState:
    """The state of training: the beginning, or the commit that all ranks have. Moves model, data and the number of chunks
    to it.
    """
    config, data = setup.config, setup.data
    if setup.agreed.opening is Opening.RESUME:
        state = resumed_state(config, store, setup.conditions)
        model.load_state(store.committer.state)
    else:
        state = TrainState(conditions=setup.conditions)
    state.job = setup.mesh.environment.job if config.parallel.elastic is Elastic.RESHARD else ""
    chunks.begin(state, store.note_in_trace)
    state.tasks = resumed(config.tasks, state.tasks)
    if isinstance(data, TaskData):
        data.begin(state.position, state.tasks)
    return state


def _slice_dense(
    setup: Setup, model: Model, units: Units, layouts: Sequence[UnitLayout]
) -> tuple[DenseSlices, Schedule]:
    """Takes the dense parameters out of the model, and moves the rest of it to the device."""
    config, mesh, compute = setup.config, setup.mesh, setup.config.model.compute_dtype.torch
    divided = None  # by default each rank has the dense parameters whole
    if mesh.tensor.size > 1:
        indices = tuple(
            frozenset(i for i, division in enumerate(unit) if division is not None)
            for unit in model.unit_divisions()
        )
        divided = DividedParameters(mesh.tensor, indices) if any(indices) else None
    dense = DenseSlices(
        units,
        layouts,
        group=mesh.data,
        device=mesh.device,
        adamw=config.adamw,
        config=config.dense,
        compute=compute,
        timeline=setup.timeline,
        divided=divided,
    )
    model.module.to(mesh.device)
    passes = config.data.passes if setup.data is not None else 1
    spec, pipeline = config.spec, mesh.pipeline
    schedule = unit_schedule(
        layouts,
        config.dense,
        config.prefetch,
        moe_layers=config.model.moe_layers,
        compute=compute,
        micro_batches=passes,
        first_block=spec.layers.start,
        order=one_forward_one_backward(pipeline.rank, pipeline.size, passes)
        if spec.whole is not None
        else (),
    )
    return dense, schedule


def _fill(setup: Setup, model: Model, store: StoreCore, dense: DenseSlices, creating: OnProgress) -> None:
    """Creates all records, or loads those of the commit that all ranks have; reads frozen records that stay in memory."""
    config, owned = setup.config, setup.owned
    count = len(owned) * len(config.model.moe_layers)

    def first_pair(layer: int, expert: int) -> npt.NDArray[np.float32]:
        shape = PairShape.of(config.model.expert_shape, config.lora)
        return np.asarray(initial_pair(shape, seed=config.lora.seed, layer=layer, expert=expert).numpy())

    if setup.agreed.opening is Opening.CREATE:
        store.reserve({EXPERT_SCHEMA: count} | dense.record_counts())
        dense.register(store)
        _register(store, EXPERT_SCHEMA, config.model.moe_layers, owned, config.spec.first_weights, creating)
    else:
        pairs = pair_schema(config) is not None
        keys = [layout.key for layout in dense.layouts if not layout.empty]
        if pairs and len(owned):
            keys += [pair_key(layer, owned[0]) for layer in config.model.moe_layers]
        if config.lora.enabled and not all(key in store.records for key in keys):  # its first run
            store.reserve(({PAIR_SCHEMA: count} if pairs else {}) | dense.record_counts())
            dense.register(store)
            if pairs:
                _register(store, PAIR_SCHEMA, config.model.moe_layers, owned, first_pair, creating)
        else:
            fresh = dense.missing(store) if config.tasks else []
            store.reserve(dense.record_counts(fresh))
            if fresh:
                dense.register(store, fresh)
            dense.load(store, store.history.applied, fresh=fresh)
        frozen = model.frozen_units()
        layouts = unit_layouts(
            frozen,
            ranks=setup.mesh.data.size,
            narrow=model.cast_parameters(),
            fusion=config.dense.fusion,
        )
        load_frozen(store, frozen, layouts, group=setup.mesh.data, device=setup.mesh.device)
        # All ranks are at this step now: acknowledges a commit that was only prepared.
        setup.mesh.world.barrier()
        store.committer.acknowledge()
    keeps_gradients = setup.timing is StepTiming.DEFERRED or config.keeps_gradients
    if keeps_gradients and (trained := trained_schema(config)) is not None:
        store.reserve_scratch(trained.name)


def _register(
    store: StoreCore,
    schema: str,
    layers: Sequence[int],
    owned: range,
    values: Callable[[int, int], npt.NDArray[np.float32]],
    progress: OnProgress,
) -> None:
    """Adds the records of the ``owned`` experts of each of ``layers``, or of their pairs; ``values(layer, expert)``: the
    first weights, which several cores draw (each record has a generator of its own).
    """
    key = expert_key if schema == EXPERT_SCHEMA else pair_key
    numbers = ((layer, expert) for layer in layers for expert in owned)
    new = (NewRecord(key(*of), schema, of[0], partial(values, *of)) for of in numbers)
    register_many(store, new, threads=min(cores(), _DRAWING), progress=progress)


def _open_experts(
    setup: Setup, store: StoreCore, schedule: Schedule, stack: contextlib.ExitStack
) -> ExpertTiers:
    """The source that the model leases its experts from; ``stack`` closes the device tiers. With LoRA the experts are
    frozen, and their pairs are trained in their place.
    """
    config, mesh, slots = setup.config, setup.mesh, setup.budgets.slots
    link = config.links.copy
    in_place = weights_in_place(config.weights_in_place, mesh.device, link)
    loads = WeightLoads.IN_PLACE if in_place else WeightLoads.COPIED
    stack.enter_context(pinned(store.arena, mesh.device, config.pinned_memory))

    def open_tier(slots: DeviceSlots[ComputeDtype]) -> DeviceTier:
        own, pinning = slots.computing(slots.compute.torch), config.pinned_memory
        tier = open_device_tier(
            store.engine, own, mesh.device, HugePages.AUTO, loads, pinning, setup.timeline
        )
        stack.callback(tier.close)
        return limited_tier(tier, store.engine, link)

    def predictor() -> Predictor:
        return make_predictor(config.prefetch.predictor, setup.owned, most=config.prefetch.guesses)

    def trained(tier: DeviceTier, key: Callable[[int, int], str]) -> TieredExperts:
        return TieredExperts(
            store,
            tier,
            find_records(store, config.model.moe_layers, setup.owned, key),
            timing=setup.timing,
            predictor=predictor(),
            schedule=schedule,
            ledger=setup.ledger,
            replicas=mesh.replica,
        )

    tier = open_tier(slots)
    if not config.lora.enabled:
        return trained(tier, expert_key)
    frozen = FrozenExperts(
        store,
        tier,
        find_records(store, config.model.moe_layers, setup.owned, expert_key),
        predictor=predictor(),
        schedule=schedule,
        ledger=setup.ledger,
    )
    pairs = setup.budgets.pairs
    if pairs is None:
        return frozen
    tier = open_tier(pairs)
    shape = PairShape.of(config.model.expert_shape, config.lora)
    return LoraExperts(frozen, trained(tier, pair_key), shape, device=mesh.device)
