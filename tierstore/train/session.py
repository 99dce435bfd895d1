"""Building and closing a training run: budgets, store, device tier, model, data, in that order.

Everything that can be refused is refused before the store's directory is touched.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tierstore._native import HugePages
from tierstore.dense import DenseSlices, dense_schemas, unit_layouts
from tierstore.errors import CapabilityError, ConfigError, StoreFormatError
from tierstore.model import Transformer
from tierstore.moe import initial_expert
from tierstore.parallel import Mesh, Place
from tierstore.prefetch import HorizontalQueue, TieredExperts, make_predictor, unit_schedule
from tierstore.prefetch.experts import TieredLease
from tierstore.stats import StallKey, StallLedger
from tierstore.store.config import StoreConfig
from tierstore.store.parameter_store import NewRecord, ParameterStore
from tierstore.tiers import DeviceSlots, open_device_tier
from tierstore.timeline import NullTimeline, TimelineSink, Track
from tierstore.train.budgets import EXPERT_SCHEMA, DeviceKind, budgets, expert_schema
from tierstore.train.config import TrainConfig
from tierstore.train.data import TextData
from tierstore.train.footprint import give_back_freed_memory
from tierstore.train.ranks import Opening, agree, rank_directory
from tierstore.train.state import TrainState, conditions, differences
from tierstore.train.trainer import Trainer

__all__ = ["Opening", "open_session", "stall_spans"]


@contextlib.contextmanager
def open_session(
    config: TrainConfig,
    opening: Opening,
    *,
    mesh: Mesh | None = None,
    trace: Path | None = None,
    timeline: TimelineSink | None = None,
    io_log: Path | None = None,
) -> Iterator[Trainer]:
    """A trainer over ``config.store``, closed at exit whatever happens; what was not committed is gone.

    On several ranks (``mesh``) this is a collective, and each has a store of its own under ``config.store``. Budgets are
    each rank's. Raises ConfigError, DataError, BudgetError, CapabilityError, StoreError, PeerError, OSError; on a failure
    nothing was created or changed.
    """
    device = choose_device(config.device) if mesh is None else mesh.device
    mesh = mesh or Mesh.alone(Place(), device)
    rank, world = mesh.world.rank, mesh.world.size
    _check_batch(config, world)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    divided = budgets(config, DeviceKind(device.type))
    data = TextData(config.data, seq_len=config.model.seq_len)
    agreed = agree(config.store, opening, mesh)
    directory = rank_directory(config.store, rank, world)
    present = conditions(
        config, threads=torch.get_num_threads(), device=device, data_crc32=data.crc32, mesh=mesh
    )
    store_config = StoreConfig(
        host_budget=divided.cache,
        lookahead=divided.lookahead,
        retain=config.retain,
        layers=config.model.moe_layers,
        cache=config.cache,
        io=config.io,
        disk=config.links.disk,
    )
    sink = timeline or NullTimeline()
    ledger = StallLedger(listener=stall_spans(sink) if sink.enabled else None)
    source = _LateSource()
    model = Transformer(config.model, source, mesh=mesh, ledger=ledger)
    units = model.dense_units()
    layouts = unit_layouts(units, ranks=world, narrow=model.cast_parameters(), fusion=config.dense.fusion)
    with contextlib.ExitStack() as stack:
        if agreed.opening is Opening.CREATE:
            schemas = [expert_schema(config), *dense_schemas(layouts)]
            store = ParameterStore.create(
                directory, schemas, store_config, adamw=config.adamw, trace=trace, io_log=io_log
            )
        else:
            store = ParameterStore.open(
                directory, store_config, adamw=config.adamw, at=agreed.at, trace=trace, io_log=io_log
            )
        stack.callback(store.close)
        resumed = agreed.opening is Opening.RESUME
        state = _resumed_state(config, store, present) if resumed else TrainState(conditions=present)
        dense = DenseSlices(
            units,
            layouts,
            group=mesh.world,
            device=device,
            adamw=config.adamw,
            config=config.dense,
            compute=config.model.compute_dtype.torch,
        )
        model.to(device)
        schedule = unit_schedule(
            layouts,
            config.dense,
            config.prefetch,
            moe_layers=config.model.moe_layers,
            compute=config.model.compute_dtype.torch,
            micro_batches=config.data.micro_batches,
        )
        queue = HorizontalQueue(schedule, dense, ledger)
        gates = dense.attach(model, queue)
        stack.callback(gates.remove)
        owned = mesh.blocks(config.model.experts).owned(mesh.expert.rank)
        if agreed.opening is Opening.CREATE:
            count = len(owned) * len(config.model.moe_layers)
            store.reserve({EXPERT_SCHEMA: count} | dense.record_counts())
            dense.register(store)
            _register_experts(config, store, owned)
        else:
            store.reserve()
            dense.load(store, store.history.applied)
            # Everybody is at this step now: what was prepared and not acknowledged is.
            mesh.world.barrier()
            store.acknowledge()
        records = {
            layer: {expert: store.record(expert_key(layer, expert)) for expert in owned}
            for layer in config.model.moe_layers
        }
        if config.keeps_gradients:
            store.reserve_scratch(EXPERT_SCHEMA)
        sizes = divided.slots
        slots = DeviceSlots(sizes.numel, config.model.compute_dtype.torch, sizes.weights, sizes.gradients)
        tier = open_device_tier(store.engine, slots, device, HugePages.AUTO, config.links.copy.open())
        stack.callback(tier.close)
        experts = TieredExperts(
            store,
            tier,
            records,
            weight_slots=sizes.weights,
            plan=config.gradient_plan,
            predictor=make_predictor(config.prefetch.predictor, owned),
            schedule=schedule,
            ledger=ledger,
            replicas=mesh.replica,
        )
        source.target = experts
        trainer = Trainer(
            config,
            store=store,
            experts=experts,
            model=model,
            dense=dense,
            queue=queue,
            data=data,
            mesh=mesh,
            state=state,
            ledger=ledger,
            timeline=sink,
        )
        if agreed.opening is Opening.CREATE:
            trainer.commit()
            give_back_freed_memory()
        yield trainer


def _check_batch(config: TrainConfig, world: int) -> None:
    if config.data.batch_size % world:
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


def expert_key(layer: int, expert: int) -> str:
    """The record key of an expert: key order is layer order, then expert order."""
    return f"expert.{layer:04d}.{expert:05d}"


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises CapabilityError for a CUDA device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise CapabilityError(
            f"device: {name} was asked for, and torch {torch.__version__} finds no CUDA device"
        )
    return torch.device(name)


def _register_experts(config: TrainConfig, store: ParameterStore, owned: range) -> None:
    shape, model = config.model.expert_shape, config.model

    def weight_of(layer: int, expert: int) -> Callable[[], npt.NDArray[np.float32]]:
        def make() -> npt.NDArray[np.float32]:
            made = initial_expert(shape, seed=model.seed, layer=layer, expert=expert, layers=model.n_layers)
            return np.asarray(made.numpy())

        return make

    store.register_many(
        NewRecord(expert_key(layer, expert), EXPERT_SCHEMA, layer, weight_of(layer, expert))
        for layer in model.moe_layers
        for expert in owned
    )


def _resumed_state(config: TrainConfig, store: ParameterStore, present: dict[str, object]) -> TrainState:
    state = TrainState.unpack(store.state, where=str(config.store))
    changed = differences(state.conditions, present)
    shape = [
        line
        for line in changed
        if line.startswith(("model.", "dense.fusion")) and not line.startswith("model.checkpoint")
    ]
    if shape:
        raise StoreFormatError(f"{config.store}: the store holds another model ({'; '.join(shape)})")
    layout = [line for line in changed if line.startswith("parallel.")]
    if layout:
        raise StoreFormatError(
            f"{config.store}: made by ranks that were laid out otherwise ({'; '.join(layout)}); tierstore reshard "
            "makes a store for this layout"
        )
    if changed:
        warnings.warn(
            f"{config.store}: this run will not be bit-identical to one that was never interrupted: "
            + "; ".join(changed),
            stacklevel=3,
        )
    state.conditions = present
    return state


class _LateSource:
    """The model is built before the store, to know the shapes of its dense units; this ties the knot."""

    def __init__(self) -> None:
        self.target: TieredExperts | None = None

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[TieredLease]:
        assert self.target is not None
        return self.target.forward(layer, experts)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[TieredLease]:
        assert self.target is not None
        return self.target.backward(layer, experts)
