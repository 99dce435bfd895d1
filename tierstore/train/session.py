"""Building and closing a training run: budgets, store, device tier, model, data, in that order.

Everything that can be refused is refused before the store's directory is touched.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tierstore._native import HugePages
from tierstore.errors import BudgetError, CapabilityError, StoreExistsError, StoreFormatError
from tierstore.model import ComputeDtype, Transformer
from tierstore.moe import initial_expert
from tierstore.prefetch import Schedule, TieredExperts, make_predictor
from tierstore.prefetch.experts import TieredLease
from tierstore.stats import StallKey, StallLedger
from tierstore.store.config import StoreConfig
from tierstore.store.format import RecordSchema, WeightFormat
from tierstore.store.opening import IDENTITY, minimum_host_budget, read_identity
from tierstore.store.parameter_store import NewRecord, ParameterStore
from tierstore.tiers import DeviceSlots, open_device_tier
from tierstore.timeline import NullTimeline, TimelineSink, Track
from tierstore.train.config import TrainConfig
from tierstore.train.data import TextData
from tierstore.train.dense import DenseParameters, dense_schemas
from tierstore.train.footprint import give_back_freed_memory
from tierstore.train.state import TrainState, conditions, differences
from tierstore.train.trainer import Trainer
from tierstore.units import format_bytes

__all__ = ["Budgets", "Opening", "budgets", "expert_schema", "open_session"]

EXPERT_SCHEMA = "expert"


class Opening(Enum):
    """Whether a run starts a store or goes on with one."""

    CREATE = "create"
    RESUME = "resume"


@dataclass(frozen=True)
class Budgets:
    """How ``host_budget`` is divided, in bytes. On a CPU the device slots come out of it."""

    cache: int
    device: int
    lookahead: int
    slots: DeviceSlots


def expert_schema(config: TrainConfig) -> RecordSchema:
    split = config.model.compute_dtype is ComputeDtype.BF16
    return RecordSchema(
        EXPERT_SCHEMA, config.model.expert_numel, WeightFormat.SPLIT_BF16 if split else WeightFormat.FP32
    )


def budgets(config: TrainConfig, device: torch.device) -> Budgets:
    """Divides the budgets. Raises BudgetError naming the minimum.

    The device tier gets as many slots as ``device_budget`` holds, or without one a few for overlap and fewer when the host
    budget is tight; at least one weight slot and one gradient slot.
    """
    minimum_cache = minimum_host_budget([expert_schema(config)], config.cache, len(config.model.moe_layers))
    least = DeviceSlots(config.model.expert_numel, config.model.compute_dtype.torch, weights=1, gradients=1)
    on_host = device.type == "cpu"
    minimum = minimum_cache + (least.nbytes if on_host else 0)
    if config.host_budget < minimum:
        raise BudgetError(
            f"host_budget: {config.host_budget} bytes ({format_bytes(config.host_budget)}) are too few for one expert "
            f"with its gradient; the minimum is {minimum} bytes ({format_bytes(minimum)})"
        )
    if config.device_budget and config.device_budget < least.nbytes:
        raise BudgetError(
            f"device_budget: {config.device_budget} bytes cannot hold one expert and its gradient; the minimum is "
            f"{least.nbytes} bytes"
        )
    allowance = config.device_budget or (max(config.host_budget // 8, least.nbytes) if on_host else 1 << 62)
    if on_host:
        allowance = min(allowance, config.host_budget - minimum_cache)
    weights, gradients = 1, 1
    while weights < 4:
        more = replace(least, weights=weights + 1, gradients=min(gradients + 1, 3))
        if more.nbytes > allowance:
            break
        weights, gradients = more.weights, more.gradients
    slots = replace(least, weights=weights, gradients=gradients)
    cache = config.host_budget - (slots.nbytes if on_host else 0)
    lookahead = int(cache * config.prefetch.budget) if config.prefetch.depth else 0
    if cache - lookahead < minimum_cache:
        lookahead = max(cache - minimum_cache, 0)
    return Budgets(cache=cache, device=slots.nbytes, lookahead=lookahead, slots=slots)


@contextlib.contextmanager
def open_session(
    config: TrainConfig,
    opening: Opening,
    *,
    trace: Path | None = None,
    timeline: TimelineSink | None = None,
    io_log: Path | None = None,
) -> Iterator[Trainer]:
    """A trainer over ``config.store``, closed at exit whatever happens; what was not committed is gone.

    Raises ConfigError, DataError, BudgetError, CapabilityError, StoreError, OSError; on a failure nothing was created or
    changed.
    """
    device = choose_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    divided = budgets(config, device)
    if opening is Opening.CREATE:
        if (config.store / IDENTITY).exists():
            raise StoreExistsError(
                f"{config.store}: there is a store here already; --resume goes on with it, --store DIR starts another"
            )
    else:
        read_identity(config.store)
    data = TextData(config.data, seq_len=config.model.seq_len)
    present = conditions(config, threads=torch.get_num_threads(), device=device, data_crc32=data.crc32)
    store_config = StoreConfig(
        host_budget=divided.cache,
        lookahead=divided.lookahead,
        retain=config.retain,
        layers=config.model.moe_layers,
        cache=config.cache,
        io=config.io,
        disk=config.links.disk,
    )
    source = _LateSource()
    model = Transformer(config.model, source)
    units = model.dense_units()
    with contextlib.ExitStack() as stack:
        if opening is Opening.CREATE:
            schemas = [expert_schema(config), *dense_schemas(units)]
            store = ParameterStore.create(
                config.store, schemas, store_config, adamw=config.adamw, trace=trace, io_log=io_log
            )
        else:
            store = ParameterStore.open(
                config.store, store_config, adamw=config.adamw, trace=trace, io_log=io_log
            )
        stack.callback(store.close)
        resumed = opening is Opening.RESUME
        state = _resumed_state(config, store, present) if resumed else TrainState(conditions=present)
        dense = DenseParameters(units, device, config.adamw)
        model.to(device)
        if opening is Opening.CREATE:
            store.reserve({EXPERT_SCHEMA: config.model.expert_count} | dense.record_counts())
            dense.register(store)
            _register_experts(config, store)
        else:
            store.reserve()
            dense.load(store, store.history.applied)
        records = {
            layer: [store.record(expert_key(layer, expert)) for expert in range(config.model.experts)]
            for layer in config.model.moe_layers
        }
        if config.keeps_gradients:
            store.reserve_scratch(EXPERT_SCHEMA)
        tier = open_device_tier(store.engine, divided.slots, device, HugePages.AUTO, config.links.copy.open())
        stack.callback(tier.close)
        sink = timeline or NullTimeline()
        ledger = StallLedger(listener=_stall_spans(sink) if sink.enabled else None)
        experts = TieredExperts(
            store,
            tier,
            records,
            weight_slots=divided.slots.weights,
            plan=config.gradient_plan,
            predictor=make_predictor(config.prefetch.predictor, config.model.experts),
            schedule=Schedule.of_layers(config.model.moe_layers, depth=config.prefetch.depth),
            ledger=ledger,
        )
        source.target = experts
        trainer = Trainer(
            config,
            store=store,
            experts=experts,
            model=model,
            dense=dense,
            data=data,
            device=device,
            state=state,
            ledger=ledger,
            timeline=sink,
        )
        if opening is Opening.CREATE:
            trainer.commit()
            give_back_freed_memory()
        yield trainer


def _stall_spans(sink: TimelineSink) -> Callable[[StallKey, int, int], None]:
    """Draws each charged interval on the timeline's track of stalls."""

    def draw(key: StallKey, start_ns: int, end_ns: int) -> None:
        sink.add(
            Track.STALLS, key.cause.value, start_ns, end_ns, {"layer": key.layer, "tier": key.tier.value}
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


def _register_experts(config: TrainConfig, store: ParameterStore) -> None:
    shape, model = config.model.expert_shape, config.model

    def weight_of(layer: int, expert: int) -> Callable[[], npt.NDArray[np.float32]]:
        def make() -> npt.NDArray[np.float32]:
            made = initial_expert(shape, seed=model.seed, layer=layer, expert=expert, layers=model.n_layers)
            return np.asarray(made.numpy())

        return make

    store.register_many(
        NewRecord(expert_key(layer, expert), EXPERT_SCHEMA, layer, weight_of(layer, expert))
        for layer in model.moe_layers
        for expert in range(model.experts)
    )


def _resumed_state(config: TrainConfig, store: ParameterStore, present: dict[str, object]) -> TrainState:
    state = TrainState.unpack(store.state, where=str(config.store))
    changed = differences(state.conditions, present)
    shape = [
        line for line in changed if line.startswith("model.") and not line.startswith("model.checkpoint")
    ]
    if shape:
        raise StoreFormatError(f"{config.store}: the store holds another model ({'; '.join(shape)})")
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
