"""experiments/pipemoe.py: its device, layers, models and scores by hand. The smoke test runs it on real ranks."""

import time

import pytest
import torch
from emulation import SleepingDevice, SlowExperts
from pipemoe import (
    EXPERTS,
    ROW_BYTES,
    Layer,
    Machine,
    PredictedPass,
    fit_pass,
    layers,
    saved_by_experts,
    score,
    summary,
)

from tierstore.machine_profile import Cost
from tierstore.moe.config import ExpertShape
from tierstore.moe.experts import Workspace, backward_expert, forward_expert
from tierstore.moe.source import InMemoryExperts
from tierstore.parallel.chunk_degree import (
    ChunkCosts,
    LayerPass,
    Share,
    backward_pass,
    forward_pass,
    pass_seconds,
    worthwhile_degree,
)

# The device -------------------------------------------------------------------------------------------------


def test_products_with_slow_weights_are_told_and_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, rows = ExpertShape(8, 4), 5
    torch.manual_seed(0)
    flat, x = torch.randn(shape.numel), torch.randn(rows, shape.d_model)
    told: list[int] = []
    device = SleepingDevice(Cost(0.0, 1.0))
    monkeypatch.setattr(device, "product", told.append)
    found = []
    for weights in (flat, device.holding(flat)):
        inner, out = torch.empty(rows, shape.inner_rows), torch.empty(rows, shape.d_model)
        gradients, grad_x = torch.empty(shape.numel), torch.empty(rows, shape.d_model)
        work = Workspace(shape, rows, x, inner=2, hidden=2)
        forward_expert(shape, weights, x, inner, out, work)
        weight, grad_out = torch.ones(rows), torch.ones(rows, shape.d_model)
        before = len(told)
        both = (weight, torch.empty(rows))
        backward_expert(shape, weights, gradients, x, inner, grad_out, grad_x, work, weights=both)
        found.append((out, gradients, grad_x))
    assert (before, told) == (2, [rows] * 4)  # two products either way
    for plain, slow in zip(*found, strict=True):
        assert torch.equal(plain, slow)


def test_a_pass_takes_its_time() -> None:
    """4 rows of 5 ms and 10 ms to start: 30 ms forward, 60 backward, in two products each."""
    device = SleepingDevice(Cost(0.01, 200.0))
    experts = SlowExperts(InMemoryExperts(ExpertShape(8, 4), layers=[0], experts=1), device)
    for walk, least in ((experts.forward, 0.03), (experts.backward, 0.06)):
        for lease in walk(0, (0,)):
            begun = time.monotonic()
            device.product(4)
            device.product(4)
            assert time.monotonic() - begun >= least
            assert (lease.gradients is None) == (walk == experts.forward)


# Layers -----------------------------------------------------------------------------------------------------


def test_layers() -> None:
    every = layers(60, 1.0)
    assert len(every) == 60
    assert {layer.machine.ranks for layer in every} == {2, 4}
    assert {layer.machine.ratio for layer in every} == {0.2, 0.5, 1.0, 2.0, 5.0}
    few = layers(6, 1.0)
    assert len(few) == 6
    assert {layer.machine.ranks for layer in few} == {2, 4}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_a_machines_ratio(ranks: int, slowdown: float) -> None:
    """A layer of the middle size: 1024 rows, of which 1 / ranks stay, there and back over the link."""
    machine = Machine(ranks, 0.001, 0.5, slowdown)
    away = 1024 * ROW_BYTES * (ranks - 1) / ranks
    exchanges = 2 * away / machine.link.bandwidth
    experts = EXPERTS * machine.speed.latency_s + 1024 / machine.speed.per_s
    assert exchanges / experts == pytest.approx(0.5, rel=1e-3)
    assert exchanges == pytest.approx(0.054 * slowdown, rel=1e-3)
    assert machine.link.latency == 0.001 * slowdown


# Models -----------------------------------------------------------------------------------------------------


def test_a_fit_by_hand() -> None:
    """10 ms and 1 ms a row, and 2 ms a chunk: once in one chunk, 6 times in 6."""
    samples = {rows: [[0.012 + rows / 1e3] * 3, [0.022 + rows / 1e3] * 3] for rows in (10, 20, 40)}
    found = fit_pass(samples)
    assert found.chunk_s == pytest.approx(0.002)
    assert found.rows.latency_s == pytest.approx(0.01)
    assert found.rows.per_s == pytest.approx(1000)


def predicted(experts_s: float = 0.06, start_s: float = 0.001, chunk_s: float = 0.002) -> PredictedPass:
    """100 rows travel each way, 102,400 bytes at 1 MB/s."""
    way = forward_pass(100 * ROW_BYTES, 0.0)
    costs = ChunkCosts(start_s, 1e-6, chunk_s, 1.0)
    return PredictedPass(costs, LayerPass(way.dispatch, Share(1, experts_s), way.combine))


def test_predictions_by_hand() -> None:
    found = predicted()
    assert found.network_s(1) == pytest.approx(2 * (0.001 + 0.1024))
    assert found.device_s(3) == pytest.approx(0.06 + 3 * 0.002)
    assert pass_seconds(found.costs, found.work, 1) == pytest.approx(0.2068 + 0.062)
    back = backward_pass(100 * ROW_BYTES, 0.0, weights_bytes=400)
    assert back.dispatch == back.combine == Share(2, 102_400 + 400)


def test_auto_keeps_one_chunk_for_less_than_2_percent() -> None:
    """0.2068 s on the network and a millisecond of experts: two chunks could hide half of it, and start twice."""
    little = predicted(experts_s=0.001, start_s=1e-5, chunk_s=0.0)
    assert pass_seconds(little.costs, little.work, 2) < pass_seconds(little.costs, little.work, 1)
    assert worthwhile_degree(little.costs, little.work, present=1, most=8).degree == 1


def test_a_score_by_hand() -> None:
    """The network's 204.8 ms and starts of 2 ms a chunk: 2 chunks do. They take 1.1 and 1.3 of 200 ms in two rounds."""
    layer, of = Layer(Machine(2, 0.001, 1.0), 512, 0), predicted()
    samples = [[0.3, 0.3], [0.22, 0.26], [0.2, 0.2], [0.3, 0.3], [0.4, 0.4], [0.5, 0.5], [0.24, 0.24]]
    chosen = worthwhile_degree(of.costs, of.work, present=1, most=8)
    found = score(layer, "forward", of, chosen, samples)
    assert (found["auto_chunks_count"], found["best_chunks_count"]) == (2, 3)
    assert found["to_best_ratio"] == pytest.approx(1.2)
    assert found["to_one_ratio"] == pytest.approx(0.8)
    assert found["same_ratio"] == pytest.approx((0.24 / 0.22 + 0.24 / 0.26) / 2)
    assert found["limit_s"] == pytest.approx(0.2 * 0.2068 + pass_seconds(of.costs, of.work, 3))
    assert score(layer, "backward", of, chosen, samples)["limit_s"] is None
    assert found["to_fixed_ratio"] == pytest.approx({"1": 0.8, "2": found["same_ratio"], "4": 0.8, "8": 0.48})
    assert found["to_whole_ratio"] == 1.0  # of 12 experts
    few = score(Layer(Machine(2, 0.001, 1.0, experts=1), 512, 0), "forward", of, chosen, samples)
    assert few["to_whole_ratio"] == found["to_one_ratio"]
    one, twelve = saved_by_experts([found, few])
    assert (one["experts_count"], twelve["experts_count"]) == (1, 12)
    assert one["saved"]["the slowest"]["mean_ratio"] == pytest.approx(0.52)
    assert one["saved"]["whole experts"]["highest_ratio"] == pytest.approx(0.2)
    assert twelve["saved"]["whole experts"]["mean_ratio"] == 0.0
    result = summary([found, {**found, "to_best_ratio": 1.0, "to_one_ratio": 1.2}])
    assert (result["close_share_ratio"], result["worst_to_best_ratio"]) == (0.5, found["to_best_ratio"])
    assert result["worst_to_one_ratio"] == 1.2
    assert result["overlap_worst_ratio"] == pytest.approx(0.2 / found["limit_s"])
    assert result["capped_count"] == 0
