"""Pairs that train beside frozen experts, over one store: torch's AdamW on plain tensors is the oracle."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tierstore._native import HugePages
from tierstore.moe import ExpertShape, MoELayer, NoiseKey, RouterConfig, SaveActivations, initial_expert
from tierstore.moe.lora import PairShape
from tierstore.moe.low_rank import initial_pair
from tierstore.prefetch import PredictorName, Schedule, StepTiming, TieredExperts, make_predictor
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.stats import StallLedger
from tierstore.store import (
    AdamWConfig,
    Inactive,
    NewRecord,
    ParameterStore,
    RecordSchema,
    StoreConfig,
    Training,
    WeightFormat,
)
from tierstore.store.opening import minimum_host_budget
from tierstore.tiers import DeviceSlots, open_device_tier

LAYERS, EXPERTS, TOKENS, LR = (0, 1), 6, 10, 3e-3
SHAPE = ExpertShape(16, 12)
PAIR = PairShape(SHAPE, 3, alpha=6.0)
ROUTER = RouterConfig(experts=EXPERTS, top_k=2, aux_loss_weight=0.0, z_loss_weight=0.0)
ADAMW = AdamWConfig(betas=(0.9, 0.99), weight_decay=0.05)
SCHEMAS = (
    RecordSchema("expert", SHAPE.numel, WeightFormat.FP32, training=Training.FROZEN),
    RecordSchema("lora", PAIR.numel),
)
LEAST = minimum_host_budget(SCHEMAS)
WHOLE = 1 << 20


def base(layer: int, expert: int) -> Tensor:
    return initial_expert(SHAPE, seed=3, layer=layer, expert=expert, layers=2)


def pair(layer: int, expert: int) -> Tensor:
    return initial_pair(PAIR, seed=3, layer=layer, expert=expert)


class Model(torch.nn.Module):
    """Two MoE layers in a row over ``source``; frozen routers."""

    def __init__(self, source: LoraExperts) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            MoELayer(ROUTER, SHAPE, source, layer=layer, seed=1, save_activations=SaveActivations.RECOMPUTE)
            for layer in LAYERS
        )
        self.requires_grad_(False)

    def forward(self, x_TD: Tensor) -> Tensor:
        for layer in self.layers:
            x_TD = x_TD + layer(x_TD, NoiseKey())[0]
        return x_TD


class Run:
    """A model with pairs over ``opened``, stepped as the trainer steps it."""

    def __init__(self, opened: ParameterStore, experts: LoraExperts) -> None:
        self.opened, self.store, self.experts = opened, opened.core, experts
        self.model = Model(experts)

    def step(self, batches: list[Tensor], clip: float = 0.0) -> float:
        total = 0.0
        with self.store.optimizer_step(LR):
            for micro, x_TD in enumerate(batches):
                self.experts.begin_micro(index=micro, count=len(batches))
                loss = loss_of(self.model(x_TD)) / len(batches)
                loss.backward()
                total += float(loss.detach())
            norm = self.experts.gradients.sum_of_squares() ** 0.5
            if clip:
                self.experts.gradients.apply(min(1.0, clip / (norm + 1e-6)))
        return total

    def pair(self, layer: int, expert: int) -> Tensor:
        key = f"lora.{layer}.{expert}"
        with self.opened.fetch([key]) as lease:
            return torch.from_numpy(lease[key].copy("weight"))


def loss_of(y_TD: Tensor) -> Tensor:
    return F.mse_loss(y_TD, torch.roll(y_TD.detach(), 1, dims=1) * 0.5 + 0.1)


def batches(step: int, count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(TOKENS, 16, generator=draw) for _ in range(count)]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:
        made = 0

        def make(
            budget: int = WHOLE,
            timing: StepTiming = StepTiming.IMMEDIATE,
            *,
            inactive: Inactive = Inactive.EXACT,
            depth: int = 0,
            path: Path | None = None,
        ) -> Run:
            nonlocal made
            made += 1
            config = StoreConfig(host_budget=budget, lookahead=budget // 4 if depth else 0)
            adamw = AdamWConfig(betas=ADAMW.betas, weight_decay=ADAMW.weight_decay, inactive=inactive)
            if path is None:
                opened = ParameterStore.create(tmp_path / str(made), SCHEMAS, config, adamw=adamw)
                for name, kind in (("expert", base), ("lora", pair)):
                    opened.register_many(
                        NewRecord(f"{name}.{layer}.{e}", name, layer, kind(layer, e).numpy())
                        for layer in LAYERS
                        for e in range(EXPERTS)
                    )
                opened.commit()
            else:
                opened = ParameterStore.open(path, config, adamw=adamw)
            stack.callback(opened.close)
            store = opened.core
            store.reserve_scratch("lora")
            sources: list[Any] = []
            for name, kind, options in (
                ("expert", FrozenExperts, {}),
                ("lora", TieredExperts, {"timing": timing}),
            ):
                numel = (SHAPE if name == "expert" else PAIR).numel
                slots = DeviceSlots(numel, torch.float32, weights=2, gradients=0 if name == "expert" else 2)
                tier = open_device_tier(store.engine, slots, torch.device("cpu"), HugePages.OFF)
                stack.callback(tier.close)
                records = {
                    layer: {e: store.record(f"{name}.{layer}.{e}") for e in range(EXPERTS)}
                    for layer in LAYERS
                }
                source: Any = kind(
                    store,
                    tier,
                    records,
                    predictor=make_predictor(PredictorName.HISTORY, range(EXPERTS)),
                    schedule=Schedule.of_layers(LAYERS, depth=depth),
                    ledger=StallLedger(),
                    **options,
                )
                sources.append(source)
            return Run(opened, LoraExperts(*sources, PAIR, device=torch.device("cpu")))

        yield make


class Oracle:
    """The same model of plain tensors, its weights ``W + scale * B A``, stepped by ``torch.optim.AdamW``."""

    def __init__(self) -> None:
        self.pairs = {(n, e): pair(n, e).requires_grad_() for n in LAYERS for e in range(EXPERTS)}
        self.optimizer = torch.optim.AdamW(
            self.pairs.values(), lr=LR, betas=ADAMW.betas, weight_decay=ADAMW.weight_decay, eps=ADAMW.eps
        )
        source: Any = None
        self.routers = [MoELayer(ROUTER, SHAPE, source, layer=n, seed=1).router for n in LAYERS]

    def step(self, batches: list[Tensor], clip: float = 0.0) -> float:
        self.optimizer.zero_grad(set_to_none=False)
        for each in self.pairs.values():
            each.grad = torch.zeros_like(each)  # moved without a gradient: what ``exact`` means
        total = 0.0
        for x_TD in batches:
            loss = loss_of(self.forward(x_TD)) / len(batches)
            loss.backward()
            total += float(loss.detach())
        if clip:
            torch.nn.utils.clip_grad_norm_(self.pairs.values(), clip)
        self.optimizer.step()
        return total

    def forward(self, x_TD: Tensor) -> Tensor:
        for layer, router in zip(LAYERS, self.routers, strict=True):
            routing = router(x_TD, NoiseKey())
            y_TD = torch.zeros_like(x_TD)
            for e in range(EXPERTS):
                views, low = SHAPE.views(base(layer, e)), PAIR.views(self.pairs[layer, e])
                inner = views.inner + PAIR.scale * low.inner_b @ low.inner_a
                down = views.down + PAIR.scale * low.down_b @ low.down_a
                gate, up = (x_TD @ inner.t()).chunk(2, dim=1)
                weight_T = (routing.weight_TK * (routing.expert_TK == e)).sum(dim=1)
                y_TD = y_TD + weight_T[:, None] * ((F.silu(gate) * up) @ down.t())
            x_TD = x_TD + y_TD
        return x_TD


@pytest.mark.parametrize(
    ("timing", "micro", "clip"),
    [(StepTiming.IMMEDIATE, 1, 0.0), (StepTiming.IMMEDIATE, 2, 0.0), (StepTiming.DEFERRED, 2, 0.05)],
    ids=["at once", "accumulated", "clipped"],
)
def test_ten_steps_follow_torch(
    make_run: Callable[..., Run], timing: StepTiming, micro: int, clip: float
) -> None:
    run, oracle = make_run(LEAST * 2, timing, depth=1), Oracle()
    for step in range(10):
        found, expected = (each.step(batches(step, micro), clip) for each in (run, oracle))
        assert found == pytest.approx(expected, rel=1e-6)
    run.experts.gradients.step_pending()
    for (layer, e), values in oracle.pairs.items():
        assert (run.pair(layer, e) - values).abs().max() <= 3e-6, (layer, e)
        assert not torch.equal(run.pair(layer, e), pair(layer, e))


def test_bits_do_not_depend_on_memory(make_run: Callable[..., Run]) -> None:
    ends = []
    for budget, depth in ((WHOLE, 0), (LEAST, 0), (LEAST * 3, 2)):
        run = make_run(budget, StepTiming.DEFERRED, depth=depth)
        losses = [run.step(batches(step, 2), clip=0.05) for step in range(4)]
        run.experts.gradients.step_pending()
        ends.append((losses, run.opened.records_crc32c()))
    assert ends[0] == ends[1] == ends[2]


def test_the_base_is_never_written(make_run: Callable[..., Run]) -> None:
    """Bytes counted: what is written is the pairs' (and what of their gradients spilled)."""
    run = make_run(LEAST)
    extents = run.store.extents.of(0, 0).extents[0]
    before = extents.file.size, dict(extents._last_write)
    written = run.store.engine.stats()["written_bytes"]
    for step in range(5):
        run.step(batches(step, 1))
        run.opened.commit()
    assert (extents.file.size, extents._last_write) == before
    slot = sum(SCHEMAS[1].layout(group).slot_bytes for group in SCHEMAS[1].groups)
    moved = run.store.engine.stats()["written_bytes"] - written
    assert 0 < moved <= 5 * 3 * slot * len(LAYERS) * EXPERTS
    for layer in LAYERS:
        for e in range(EXPERTS):
            with run.opened.fetch([f"expert.{layer}.{e}"]) as lease:
                assert torch.equal(
                    torch.from_numpy(lease[f"expert.{layer}.{e}"].copy("weight")), base(layer, e)
                )


@pytest.mark.parametrize("inactive", Inactive)
def test_goes_on_where_it_was_committed(make_run: Callable[..., Run], inactive: Inactive) -> None:
    whole = make_run(inactive=inactive)
    cut = make_run(inactive=inactive)
    for step in range(3):
        whole.step(batches(step, 1))
        cut.step(batches(step, 1))
    cut.opened.commit()
    cut.opened.close()
    cut = make_run(path=cut.store.directory, inactive=inactive)
    assert cut.step(batches(3, 1)) == whole.step(batches(3, 1))
    assert cut.opened.records_crc32c() == whole.opened.records_crc32c()


def test_evaluation_changes_nothing(make_run: Callable[..., Run]) -> None:
    run = make_run(LEAST)
    run.step(batches(0, 1))
    before = run.opened.records_crc32c()
    run.experts.begin_evaluation()
    with torch.no_grad():
        first, second = (run.model(batches(9, 1)[0]) for _ in range(2))
    assert torch.equal(first, second)
    assert run.opened.records_crc32c() == before
