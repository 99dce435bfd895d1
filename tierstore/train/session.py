"""Building and closing a training run: budgets, store, device tier, model, data, in that order.

Everything that can be refused is refused before the store's directory is touched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from tierstore._native import StepClock
from tierstore.dense import DenseSlices, GatherDtype, UnitLayout, dense_schemas, unit_layouts
from tierstore.dense.gates import Gates, PassListener
from tierstore.dense.parameters import DividedParameters, Units, load_frozen
from tierstore.errors import ConfigError
from tierstore.model.config import CheckpointActivations
from tierstore.model.interface import Model
from tierstore.model.spec import ModelSpec
from tierstore.model.store_schema import EXPERT_SCHEMA, PAIR_SCHEMA, STATE_KEY, TrainState, pair_key, table_of
from tierstore.model.transformer import Transformer
from tierstore.moe.guessing import RouterGuesses
from tierstore.moe.source import ExpertSource, JointSource, Pipelining, SourceSlot, in_training
from tierstore.parallel import Mesh, RankEnvironment, rank_device
from tierstore.parallel.config import Elastic
from tierstore.prefetch import HorizontalQueue, Schedule, unit_schedule
from tierstore.prefetch.experts import ExpertTiers
from tierstore.prefetch.plan import StepTiming, group_order
from tierstore.prefetch.predictor import PredictorName
from tierstore.stats import Cause, StallKey, StallLedger
from tierstore.store.config import StoreConfig
from tierstore.store.core import StoreCore
from tierstore.store.disk.home import rank_directory, rank_stripe
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.reading import read_schemas, read_states
from tierstore.tiers.slots import DeviceKind
from tierstore.timeline import NullTimeline, TimelineSink, Track
from tierstore.train.boundaries import BoundaryStore, open_boundaries
from tierstore.train.budgets import Budgets, budgets, expert_schema, pair_schema, trained_schema
from tierstore.train.combinations import check_combination
from tierstore.train.config import TrainConfig
from tierstore.train.data import TextData, TrainingData
from tierstore.train.elastic import MadeOver, follow_ranks
from tierstore.train.experts import ExpertOpener, register_experts, register_pairs
from tierstore.train.files import DataConfig
from tierstore.train.footprint import boundary_split, return_freed_memory
from tierstore.train.layer_order import LayerParts
from tierstore.train.pipelining import PipelineControl, check_chunks, most_chunks
from tierstore.train.ranks import Agreed, Opening, agree, check_alike
from tierstore.train.stages import one_forward_one_backward, stage_config
from tierstore.train.state import check_records, conditions, resumed_state
from tierstore.train.step_time import StepTimer, ThreadTimes, stolen_while_running
from tierstore.train.stepping import SessionParts, Stepper
from tierstore.train.task_data import TaskData, open_tasks, own_head_tasks, refuse_tasks
from tierstore.train.tasks import resumed
from tierstore.train.tokens.data import TokenData, open_data
from tierstore.train.trainer import Trainer
from tierstore.train.vocabulary import VocabularyTables, choose_vocabulary


@contextlib.contextmanager
def open_session(
    config: TrainConfig,
    opening: Opening,
    *,
    mesh: Mesh | None = None,
    trace: Path | None = None,
    timeline: TimelineSink | None = None,
    io_log: Path | None = None,
    accepted: Callable[[], None] = lambda: None,
    tokenising: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Trainer]:
    """A trainer over ``config.store``, closed at exit whatever happens; what was not committed is gone.

    On several ranks (``mesh``) this is a collective, and each has a store of its own under ``config.store``. Budgets are
    each rank's. ``accepted`` is called when nothing has been refused, before the first write; ``tokenising`` with bytes that
    were tokenised and bytes in all, where documents must be. Raises ConfigError,
    DataError, BudgetError, CapabilityError, StoreError, PeerError, OSError; on a failure nothing was created or changed.
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
        ) as parts,
        contextlib.closing(ThreadTimes()) as threads,
    ):
        assert parts.data is not None
        yield Trainer(parts, parts.data, StepTimer(parts.ledger, threads, stolen_while_running()))


class SessionWatch(Protocol):
    """Stands between a model and the session's parts, for a loop that must be seen to do everything in its order."""

    def listener(self, queue: PassListener) -> PassListener:
        """What hears of passes over the dense units, and passes it on to ``queue``."""
        ...

    def source(self, experts: JointSource) -> ExpertSource:
        """What the model asks for experts, which come from ``experts``; in layer order a ``JointSource``, too."""
        ...


class Loop(Enum):
    """Whose loop drives a session: our own, over ``config.data``, or somebody else's, with data, schedule and clipping of
    its own. There the steps of experts are always deferred, so that a step can be given up until its end.
    """

    OWN = "own"
    FOREIGN = "foreign"


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
    accepted: Callable[[], None] = lambda: None,
    tokenising: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[SessionParts]:
    """What ``open_session`` makes its trainer of, for whoever drives it; closed at exit."""
    setup = _prepare(config, opening, loop, mesh, timeline or NullTimeline(), tokenising)
    config = setup.config
    accepted()
    pipelining = Pipelining(setup.timeline)
    pipeline = PipelineControl(config, setup.mesh, pipelining)
    shell = _build_model(setup, SourceSlot(pipelining))
    with contextlib.ExitStack() as stack:
        store = _open_store(setup, shell, trace=trace, io_log=io_log)
        stack.callback(store.close)
        if (budget := store.write_budget) is not None:
            setup.ledger.divert(Cause.WRITE_BUDGET, lambda: budget.blocked_ns)
        state = _initial_state(setup, shell, store, pipeline)
        dense, schedule = _slice_dense(setup, shell)
        queue = HorizontalQueue(schedule, dense, setup.ledger)
        gates = dense.attach(shell.model, queue if watch is None else watch.listener(queue))
        stack.callback(gates.remove)
        _fill(setup, shell, store, dense)
        experts = _open_experts(setup, store, schedule, stack)
        shell.source.target = experts if watch is None else watch.source(experts)
        _guess_ahead(setup, shell, experts, stack)
        parts = SessionParts(
            config=config,
            timing=setup.timing,
            store=store,
            experts=experts,
            model=shell.model,
            dense=dense,
            queue=queue,
            data=setup.data,
            mesh=setup.mesh,
            state=state,
            ledger=setup.ledger,
            timeline=setup.timeline,
            pipeline=pipeline,
            layers=_layer_parts(setup, store, gates, shell.source, stack),
            vocabulary=setup.vocabulary,
            made_over=setup.made_over,
        )
        if setup.agreed.opening is Opening.CREATE:
            # A store is one from its first commit on: none is before all ranks have made theirs.
            setup.mesh.world.barrier()
            Stepper(parts).commit()
            return_freed_memory()
        yield parts


# The parts, in order ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """What is checked, read and agreed on before the store's directory is touched."""

    config: TrainConfig
    mesh: Mesh
    budgets: Budgets
    timing: StepTiming
    data: TrainingData | None
    agreed: Agreed
    conditions: dict[str, object]
    vocabulary: VocabularyTables
    timeline: TimelineSink
    ledger: StallLedger
    made_over: MadeOver | None

    @property
    def owned(self) -> range:
        """This rank's experts, of each layer."""
        return self.mesh.blocks(self.config.model.experts).owned(self.mesh.expert.rank)

    @property
    def keeps_gradients(self) -> bool:
        """Whether expert gradients outlive their backward pass, and may spill to disk."""
        return self.timing is StepTiming.DEFERRED or self.config.keeps_gradients


@dataclass(frozen=True, kw_only=True)
class _Shell:
    """The model without its experts: ``source`` is where they will come from."""

    model: Model
    source: SourceSlot
    units: Units
    layouts: Sequence[UnitLayout]


def _prepare(
    config: TrainConfig,
    opening: Opening,
    loop: Loop,
    mesh: Mesh | None,
    timeline: TimelineSink,
    progress: Callable[[int, int], None],
) -> _Setup:
    device = rank_device(config.device, RankEnvironment()) if mesh is None else mesh.device
    mesh = mesh or Mesh.alone(RankEnvironment(), device)
    check_combination(config, mesh.layout)
    config.check_length()
    _check_batch(config, mesh.data.size)
    check_chunks(config, mesh)
    if loop is Loop.FOREIGN:
        _refuse_foreign(config)
    refuse_tasks(config, mesh.data.size)
    whole, config = config, stage_config(config, mesh.pipeline.rank, mesh.stages)
    if loop is Loop.FOREIGN and mesh.stages > 1:
        raise ConfigError(
            "parallel.stages: expected 1: a loop of your own drives one pass after another, and stages take those of "
            "several micro-batches in turns"
        )
    if config.threads:
        torch.set_num_threads(config.threads)
    compute_deterministically(device)
    divided = budgets(config, DeviceKind(device.type))
    boundary_split(config, mesh.data.size, len(config.model.architecture.units) - 2)  # a refusal comes here
    made_over = follow_ranks(config, opening, mesh)
    agreed = agree(config.store, opening, mesh)
    if agreed.opening is Opening.RESUME:
        check_records(config, read_schemas(rank_directory(config.store, mesh.world.rank, mesh.world.size)))
    recorded = _recorded(config, mesh, agreed)
    total_steps = table_of(recorded.get("schedule", {})).get("total_steps")
    # A run goes on with the schedule that it began with, unless it is told otherwise.
    schedule = config.schedule.over(total_steps if isinstance(total_steps, int) else config.steps)
    config = replace(config, schedule=schedule)
    vocabulary = _choose_vocabulary(whole, mesh, recorded)
    # Last, for to tokenise may take hours.
    data = _open_data(config, mesh, progress) if loop is Loop.OWN else None
    present = conditions(
        config,
        threads=torch.get_num_threads(),
        device=device,
        data_crc32=None if data is None else data.crc32,
        mesh=mesh,
        vocabulary=vocabulary,
    )
    check_alike(config, present, mesh)
    return _Setup(
        config=config,
        mesh=mesh,
        budgets=divided,
        timing=config.step_timing if loop is Loop.OWN else StepTiming.DEFERRED,
        data=data,
        agreed=agreed,
        conditions=present,
        vocabulary=vocabulary,
        timeline=timeline,
        ledger=StallLedger(listener=stall_spans(timeline) if timeline.enabled else None),
        made_over=made_over,
    )


def _refuse_foreign(config: TrainConfig) -> None:
    """Raises ConfigError for what a foreign loop cannot drive."""
    if config.tasks:
        raise ConfigError("tasks: a loop of your own brings its own data; expected none")
    if config.data.layer_major:
        raise ConfigError(
            "data.micro_order: expected micro or auto: a loop of your own drives one pass after another, and layer order "
            "needs all micro-batches of a step at once"
        )


def _recorded(config: TrainConfig, mesh: Mesh, agreed: Agreed) -> dict[str, object]:
    """The conditions under which the store was trained so far; empty where it is made, or has only been imported."""
    if agreed.opening is not Opening.RESUME:
        return {}
    directory = rank_directory(config.store, mesh.world.rank, mesh.world.size)
    raw = read_states(directory, STATE_KEY)[agreed.at]
    return TrainState.unpack({STATE_KEY: raw}, where=str(directory)).conditions


def _choose_vocabulary(config: TrainConfig, mesh: Mesh, recorded: Mapping[str, object]) -> VocabularyTables:
    """Of a store that is there, AUTO is what it was made with."""
    parallel = table_of(recorded.get("parallel", {})) if recorded else None
    device = DeviceKind(mesh.device.type)
    return choose_vocabulary(config, ranks=mesh.data.size, device=device, recorded=parallel)


def _open_data(config: TrainConfig, mesh: Mesh, progress: Callable[[int, int], None]) -> TrainingData:
    def open_source(data: DataConfig) -> TextData | TokenData:
        return open_data(
            data,
            seq_len=config.model.seq_len,
            vocab_size=config.model.vocab_size,
            tokenizer=config.spec.tokenizer,
            store=config.store,
            together=config.spec.mixes_documents,
            first=mesh.world.rank == 0,
            barrier=mesh.world.barrier,
            progress=progress,
        )

    return open_tasks(config, mesh.data.size, open_source) if config.tasks else open_source(config.data)


def compute_deterministically(device: torch.device) -> None:
    """Makes torch compute the same bits each time on ``device``, or raise. Before the first product on it."""
    if device.type == "cuda":
        # Without it cuBLAS divides its workspace among streams as they come, and torch refuses every product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _build_model(setup: _Setup, source: SourceSlot) -> _Shell:
    config, mesh = setup.config, setup.mesh
    vocabulary = setup.vocabulary
    model = _spec(config).build(source, mesh=mesh, ledger=setup.ledger, vocabulary=vocabulary.partition)
    heads = model.add_heads(own_head_tasks(config)) if isinstance(model, Transformer) else {}
    units = model.dense_units()
    narrow = config.dense.gather is GatherDtype.COMPUTE
    if not narrow and any(parameter.dtype != torch.float32 for _, unit in units for parameter in unit):
        raise ConfigError(
            "dense.gather: expected compute: this model takes its parameters in bf16, and casts none itself"
        )
    layouts = unit_layouts(
        units,
        ranks=mesh.data.size,
        narrow=model.cast_parameters(),
        fusion=config.dense.fusion,
        tables=vocabulary.tables,
        apart=heads,
    )
    return _Shell(model=model, source=source, units=units, layouts=layouts)


def _spec(config: TrainConfig) -> ModelSpec:
    """What the model is built from. In layer order blocks are computed again by the step itself."""
    name, off = "checkpoint_activations", CheckpointActivations.OFF
    return (config.spec.vary(name, off) if config.data.layer_major else None) or config.spec


def _open_store(setup: _Setup, shell: _Shell, *, trace: Path | None, io_log: Path | None) -> StoreCore:
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
        schemas = [expert_schema(config), *dense_schemas(shell.layouts)]
        return ParameterStore.create(
            directory, schemas, store_config, adamw=config.adamw, trace=trace, io_log=io_log
        ).core
    pairs = pair_schema(config)
    return ParameterStore.open(
        directory,
        store_config,
        adamw=config.adamw,
        at=agreed.at,
        # What is trained beside frozen records came after them, and a task may bring a head of its own; otherwise the store
        # has them all.
        further=[*([pairs] if pairs else []), *dense_schemas(shell.layouts)]
        if config.lora.enabled or config.tasks
        else [],
        trace=trace,
        io_log=io_log,
    ).core


def _initial_state(setup: _Setup, shell: _Shell, store: StoreCore, pipeline: PipelineControl) -> TrainState:
    """Where training stands: at its beginning, or at the commit that everybody has. Brings model, data and the number of
    chunks there.
    """
    config, data = setup.config, setup.data
    if setup.agreed.opening is Opening.RESUME:
        state = resumed_state(config, store, setup.conditions)
        shell.model.load_state(store.committer.state)
    else:
        state = TrainState(conditions=setup.conditions)
    state.job = setup.mesh.environment.job if config.parallel.elastic is Elastic.RESHARD else ""
    pipeline.begin(state, store.note_in_trace)
    state.tasks = resumed(config.tasks, state.tasks)
    if isinstance(data, TaskData):
        data.begin(state.position, state.tasks)
    return state


def _slice_dense(setup: _Setup, shell: _Shell) -> tuple[DenseSlices, Schedule]:
    """Takes the dense parameters out of the model, and brings what is left of it to the device."""
    config, compute = setup.config, setup.config.model.compute_dtype.torch
    dense = DenseSlices(
        shell.units,
        shell.layouts,
        group=setup.mesh.data,
        device=setup.mesh.device,
        adamw=config.adamw,
        config=config.dense,
        compute=compute,
        timeline=setup.timeline,
        divided=_divided(setup.mesh, shell.model),
    )
    shell.model.module.to(setup.mesh.device)
    passes = config.data.passes if setup.data is not None else 1
    spec, pipeline = config.spec, setup.mesh.pipeline
    schedule = unit_schedule(
        shell.layouts,
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


def _divided(mesh: Mesh, model: Model) -> DividedParameters | None:
    """Which dense parameters this rank has a part of; None where it has all of them whole."""
    if mesh.tensor.size == 1:
        return None
    units = model.unit_divisions()
    indices = tuple(frozenset(i for i, division in enumerate(unit) if division is not None) for unit in units)
    return DividedParameters(mesh.tensor, indices) if any(indices) else None


def _fill(setup: _Setup, shell: _Shell, store: StoreCore, dense: DenseSlices) -> None:
    """Makes all records, or takes up those of the commit that everybody has; of what is frozen, reads what stays."""
    config, owned = setup.config, setup.owned
    count = len(owned) * len(config.model.moe_layers)
    if setup.agreed.opening is Opening.CREATE:
        store.reserve({EXPERT_SCHEMA: count} | dense.record_counts())
        dense.register(store)
        register_experts(config, store, owned)
    else:
        if config.lora.enabled and not _adapted(shell, store, owned, config):
            pairs = {PAIR_SCHEMA: count} if pair_schema(config) else {}
            store.reserve(pairs | dense.record_counts())
            dense.register(store)
            register_pairs(config, store, owned)
        else:
            fresh = dense.missing(store) if config.tasks else []
            store.reserve(dense.record_counts(fresh))
            if fresh:
                dense.register(store, fresh)
            dense.load(store, store.history.applied, fresh=fresh)
        _load_frozen(setup, shell, store)
        # Everybody is at this step now: what was prepared and not acknowledged is.
        setup.mesh.world.barrier()
        store.committer.acknowledge()
    if setup.keeps_gradients and (trained := trained_schema(config)) is not None:
        store.reserve_scratch(trained.name)


def _open_experts(
    setup: _Setup, store: StoreCore, schedule: Schedule, stack: contextlib.ExitStack
) -> ExpertTiers:
    return ExpertOpener(
        config=setup.config,
        store=store,
        mesh=setup.mesh,
        owned=setup.owned,
        budgets=setup.budgets,
        timing=setup.timing,
        schedule=schedule,
        ledger=setup.ledger,
    ).open(stack)


def _guess_ahead(setup: _Setup, shell: _Shell, experts: ExpertTiers, stack: contextlib.ExitStack) -> None:
    """Where routers are to guess, has each pass tell ``experts`` what later layers will ask for."""
    prefetch = setup.config.prefetch
    if prefetch.predictor is PredictorName.ROUTER and prefetch.depth:
        guesses = RouterGuesses(
            shell.model.routers(),
            experts,
            mesh=setup.mesh,
            ledger=setup.ledger,
            training=partial(in_training, shell.source),
        )
        stack.callback(guesses.remove)


def _layer_parts(
    setup: _Setup, store: StoreCore, gates: Gates, slot: SourceSlot, stack: contextlib.ExitStack
) -> LayerParts | None:
    """What steps in layer order need beside the other parts; None where they are taken in micro order."""
    boundaries = _open_boundaries(setup, store)
    if boundaries is None:
        return None
    return LayerParts(gates=gates, slot=slot, boundaries=stack.enter_context(boundaries))


def _open_boundaries(setup: _Setup, store: StoreCore) -> BoundaryStore | None:
    """Where block inputs are kept; their space on disk is reserved here, if any of them is spilled."""
    blocks = len(setup.config.model.architecture.units) - 2
    split = boundary_split(setup.config, setup.mesh.data.size, blocks)
    if split is None:
        return None
    count = setup.config.data.micro_batches
    return open_boundaries(store, setup.ledger, split, layers=range(blocks), micro_batches=count)


def _adapted(shell: _Shell, store: StoreCore, owned: range, config: TrainConfig) -> bool:
    """Whether the store has the records of pairs already."""
    keys = [layout.key for layout in shell.layouts if not layout.empty]
    if pair_schema(config) is not None:
        keys += [pair_key(layer, owned[0]) for layer in config.model.moe_layers if len(owned)]
    return all(key in store.records for key in keys)


def _load_frozen(setup: _Setup, shell: _Shell, store: StoreCore) -> None:
    units = shell.model.frozen_units()
    layouts = unit_layouts(
        units,
        ranks=setup.mesh.data.size,
        narrow=shell.model.cast_parameters(),
        fusion=setup.config.dense.fusion,
    )
    load_frozen(store, units, layouts, group=setup.mesh.data, device=setup.mesh.device)


def _check_batch(config: TrainConfig, world: int) -> None:
    if config.data.batch_size % world and not config.tasks:
        raise ConfigError(
            f"data.batch_size: expected a multiple of the {world} ranks, got {config.data.batch_size}"
        )


def stall_spans(sink: TimelineSink) -> Callable[[StallKey, int, int], None]:
    """Draws each charged interval on the timeline's track of stalls."""

    def draw(key: StallKey, start_ns: int, end_ns: int) -> None:
        sink.add(
            Track.STALLS,
            key.cause.value,
            start_ns,
            end_ns,
            {"layer": key.layer, "dimension": key.tier.dimension.value, "tier": key.tier.value},
        )

    return draw
