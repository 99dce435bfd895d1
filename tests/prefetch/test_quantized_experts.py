"""Quantised experts of a store, in the host cache and through slots: the same bits as their record's, at their true size."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from tierstore._native import HugePages
from tierstore.errors import ConfigError, DataError
from tierstore.moe.config import Activation, ExpertShape
from tierstore.prefetch import PredictorName, Schedule, make_predictor
from tierstore.prefetch.experts import FrozenExperts
from tierstore.quant.layout import CodeFormat, quantize
from tierstore.quant.weights import QuantizedWeights
from tierstore.stats import StallLedger
from tierstore.store import NewRecord, ParameterStore, RecordSchema, StoreConfig, Training, WeightFormat
from tierstore.tiers import DeviceSlots, WeightLoads, open_device_tier

SHAPE = ExpertShape(48, 70, Activation.CLAMPED_SWIGLU)
EXPERTS, LAYERS = 5, (0, 1)


def initial(layer: int, expert: int) -> np.ndarray:
    return np.random.default_rng([layer, expert]).normal(size=SHAPE.numel).astype(np.float32)


def schema_of(codes: CodeFormat) -> RecordSchema:
    kept = WeightFormat(codes.value)
    return RecordSchema(
        "expert", SHAPE.numel, kept, training=Training.FROZEN, quantized=SHAPE.quantized(codes)
    )


def record(codes: CodeFormat, layer: int, expert: int) -> bytes:
    """What the record of an expert holds."""
    layout = SHAPE.quantized(codes)
    data = np.empty(layout.nbytes, np.uint8)
    quantize(layout, initial(layer, expert), data, name="x")
    return data.tobytes()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FrozenExperts]]:
    with ExitStack() as stack:

        def made(codes: CodeFormat, loads: WeightLoads, room: int) -> FrozenExperts:
            schema = schema_of(codes)
            slot = -(-schema.record_bytes // 4096) * 4096
            config = StoreConfig(host_budget=room * slot)
            with ParameterStore.create(tmp_path / "s", [schema], config) as store:
                store.register_many(
                    NewRecord(f"{layer}.{expert}", "expert", layer, initial(layer, expert))
                    for layer in LAYERS
                    for expert in range(EXPERTS)
                )
                store.commit()
            opened = ParameterStore.open(tmp_path / "s", config)
            stack.callback(opened.close)
            assert opened.verify().failures == []
            core = opened.core
            slots = DeviceSlots(SHAPE.numel, torch.bfloat16, 2, 0, schema.quantized)
            assert slots.nbytes == 2 * slot
            tier = open_device_tier(core.engine, slots, torch.device("cpu"), HugePages.OFF, loads)
            stack.callback(tier.close)
            return FrozenExperts(
                core,
                tier,
                {layer: {e: core.record(f"{layer}.{e}") for e in range(EXPERTS)} for layer in LAYERS},
                predictor=make_predictor(PredictorName.NONE, range(EXPERTS)),
                schedule=Schedule.of_layers(LAYERS, depth=0),
                ledger=StallLedger(),
            )

        yield made


@pytest.mark.parametrize("codes", CodeFormat)
@pytest.mark.parametrize("loads", WeightLoads)
@pytest.mark.parametrize("room", [2, 2 * EXPERTS])
def test_leases_are_the_records(
    make: Callable[..., FrozenExperts], codes: CodeFormat, loads: WeightLoads, room: int
) -> None:
    experts = make(codes, loads, room)
    experts.begin_evaluation()
    for layer in (*LAYERS, *LAYERS):
        seen = 0
        for lease in experts.forward(layer, range(EXPERTS)):
            assert isinstance(lease.weights, QuantizedWeights)
            assert lease.weights.data.numpy().tobytes() == record(codes, layer, lease.expert)
            with pytest.raises(ConfigError, match="only forward passes"):
                _ = lease.flat
            seen += 1
        assert seen == EXPERTS


def test_what_lies_in_memory_is_leased_together(make: Callable[..., FrozenExperts]) -> None:
    """And first; what was read for this pass comes by itself, as it is waited for."""
    experts = make(CodeFormat.INT8, WeightLoads.IN_PLACE, 2 * EXPERTS)
    experts.begin_evaluation()
    asked = range(1, EXPERTS)
    assert [lease.more for lease in experts.forward(LAYERS[0], asked)] == [False] * len(asked)
    assert [lease.more for lease in experts.forward(LAYERS[0], asked)] == [True] * (len(asked) - 1) + [False]
    found = [(lease.expert, lease.more) for lease in experts.forward(LAYERS[0], range(EXPERTS))]
    assert found == [*((expert, expert != asked[-1]) for expert in asked), (0, False)]


def test_a_record_that_is_not_finite_is_named(tmp_path: Path) -> None:
    weights = initial(0, 0)
    weights[5] = np.nan
    with (
        ParameterStore.create(tmp_path / "s", [schema_of(CodeFormat.INT4)]) as store,
        pytest.raises(DataError, match="record 'e': weight: has a weight that is not finite"),
    ):
        store.register_many([NewRecord("e", "expert", 0, weights)])
