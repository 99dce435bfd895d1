"""bench pipemoe: its device, models and verdicts by hand, and one layer on real ranks. No test asserts a speed."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tierstore.bench.pipemoe.cases import (
    EXPERTS,
    ROW_BYTES,
    EmulatedMachine,
    ScoredLayer,
    scored_layers,
    spread,
)
from tierstore.bench.pipemoe.device import DeviceSpeed, SleepingDevice, SleepingExperts, slow_weights
from tierstore.bench.pipemoe.models import FittedMachine, FittedPass, fit_pass
from tierstore.bench.pipemoe.rank import LayerRequest, LayerSamples, measure_layer
from tierstore.bench.pipemoe.run import PipelineBench, measurements, score_pass, summary
from tierstore.cli.main import cli
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig
from tierstore.machine_profile import Cost
from tierstore.moe.config import ExpertShape
from tierstore.moe.experts import Workspace, backward_weighted_expert, forward_expert
from tierstore.parallel import Mesh
from tierstore.parallel.pipeline_degree import Share

# The device -------------------------------------------------------------------------------------------------


def test_products_with_slow_weights_are_told_and_have_the_same_bits() -> None:
    shape, rows = ExpertShape(8, 4), 5
    torch.manual_seed(0)
    flat, x = torch.randn(shape.numel), torch.randn(rows, shape.d_model)
    told: list[int] = []
    found = []
    for weights in (flat, slow_weights(flat, told.append)):
        inner, out = torch.empty(rows, shape.inner_rows), torch.empty(rows, shape.d_model)
        gradients, grad_x = torch.empty(shape.numel), torch.empty(rows, shape.d_model)
        work = Workspace(shape, rows, x, inner=2, hidden=2)
        forward_expert(shape, weights, x, inner, out, work)
        weight, grad_out = torch.ones(rows), torch.ones(rows, shape.d_model)
        before = len(told)
        backward_weighted_expert(shape, weights, gradients, x, inner, weight, grad_out, grad_x, work)
        found.append((out, gradients, grad_x))
    assert (before, told) == (2, [rows] * 4)  # two products either way
    for plain, slow in zip(*found, strict=True):
        assert torch.equal(plain, slow)


def test_a_pass_takes_its_time() -> None:
    """4 rows of 5 ms and 10 ms to start: 30 ms forward, 60 backward, in two products each."""
    device = SleepingDevice()
    device.speed = DeviceSpeed(0.01, 0.005)
    experts = SleepingExperts(ExpertShape(8, 4), device)
    for walk, least in ((experts.forward, 0.03), (experts.backward, 0.06)):
        for lease in walk(0, (0,)):
            begun = time.monotonic()
            device.product(4)
            device.product(4)
            assert time.monotonic() - begun >= least
            assert (lease.gradients is None) == (walk == experts.forward)


# Cases ------------------------------------------------------------------------------------------------------


def test_cases() -> None:
    layers = list(scored_layers())
    assert len(layers) == 60
    assert {layer.machine.ranks for layer in layers} == {2, 4}
    assert {layer.machine.ratio for layer in layers} == {0.2, 0.5, 1.0, 2.0, 5.0}
    assert spread(layers, 60) == layers
    few = spread(layers, 6)
    assert len(few) == 6
    assert {layer.machine.ranks for layer in few} == {2, 4}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_a_machines_ratio(ranks: int, slowdown: float) -> None:
    """A layer of the middle size: 1024 rows, of which 1 / ranks stay, there and back over the link."""
    machine = EmulatedMachine(ranks, 0.0, 0.5, slowdown)
    away = 1024 * ROW_BYTES * (ranks - 1) / ranks
    exchanges = 2 * away / machine.link.bandwidth
    experts = EXPERTS * machine.speed.start_s + 1024 * machine.speed.row_s
    assert exchanges / experts == pytest.approx(0.5, rel=1e-3)
    assert exchanges == pytest.approx(0.054 * slowdown, rel=1e-3)


# Models -----------------------------------------------------------------------------------------------------


def test_a_fit_by_hand() -> None:
    """10 ms and 1 ms a row, and 2 ms a chunk: once in one chunk, 5 times in 5."""
    samples = {rows: [[0.012 + rows / 1e3] * 3, [0.02 + rows / 1e3] * 3] for rows in (10, 20, 40)}
    found = fit_pass(samples, (1, 5))
    assert found.chunk_s == pytest.approx(0.002)
    assert found.rows.latency_s == pytest.approx(0.01)
    assert found.rows.per_s == pytest.approx(1000)


LOADS = LayerSamples(forward_s=(), backward_s=(), travelling=100, computed=50, experts=4)
MACHINE = FittedMachine(
    Cost(0.001, 1e6), FittedPass(Cost(0.01, 1e3), 0.002), FittedPass(Cost(0.02, 500), 0.003)
)


def test_predictions_by_hand() -> None:
    """Forward: 102,400 bytes each way, 60 ms of experts. Backward: 400 bytes of weights besides, 120 ms."""
    forward, backward = MACHINE.forward_of(LOADS), MACHINE.backward_of(LOADS)
    assert forward.network_s(1) == pytest.approx(2 * (0.001 + 0.1024))
    assert forward.device_s(3) == pytest.approx(0.06 + 3 * 0.002)
    assert forward.seconds(1) == pytest.approx(0.2068 + 0.062)
    assert forward.longer_s == pytest.approx(0.2068)
    assert forward.exposed_s(1) == pytest.approx(0.062)
    assert forward.exposed_s(2) == pytest.approx(forward.seconds(2) - 0.2068)
    assert backward.work.dispatch == backward.work.combine == Share(2, 102_400 + 400)
    assert backward.device_s(1) == pytest.approx(0.12 + 0.003)


def test_auto_keeps_one_chunk_for_less_than_2_percent() -> None:
    """0.2068 s on the network and a millisecond of experts: two chunks could hide half of it, and start twice."""
    little = FittedMachine(Cost(1e-5, 1e6), FittedPass(Cost(0.0, 5e4), 0.0), FittedPass(Cost(0.0, 5e4), 0.0))
    predicted = little.forward_of(LOADS)
    assert predicted.seconds(2) < predicted.seconds(1)
    assert (predicted.auto(8).degree, predicted.auto(8).seconds) == (1, predicted.seconds(1))


def test_a_score_by_hand() -> None:
    """The network's 204.8 ms and starts of 2 ms a chunk: 2 chunks do. They take 1.1 and 1.3 of 200 ms in two rounds."""
    layer = ScoredLayer(EmulatedMachine(2, 0.001, 1.0), 512, 0)
    predicted = MACHINE.forward_of(LOADS)
    samples = [[0.3, 0.3], [0.22, 0.26], [0.2, 0.2], [0.3, 0.3], [0.4, 0.4], [0.5, 0.5], [0.24, 0.24]]
    score = score_pass(layer, "forward", predicted, samples)
    assert (score.auto_degree, score.best_degree, score.capped) == (2, 3, False)
    assert score.to_best_ratio == pytest.approx(1.2)
    assert score.to_one_ratio == pytest.approx(0.8)
    assert score.same_ratio == pytest.approx((0.24 / 0.22 + 0.24 / 0.26) / 2)
    assert score.limit_s == pytest.approx(1.2 * 0.2068 + predicted.exposed_s(3))
    assert score_pass(layer, "backward", predicted, samples).limit_s is None
    result = summary([score, replace(score, to_best_ratio=1.0, to_one_ratio=1.2)], PipelineBench())
    assert (result.close_share_ratio, result.worst_to_best_ratio) == (0.5, score.to_best_ratio)
    assert result.worst_to_one_ratio == 1.2
    assert result.overlap_worst_ratio == pytest.approx(0.2 / (score.limit_s or 0))
    assert {one.name for one in measurements(result)} >= {"passes within 5% of the best", "AUTO to one chunk"}


# Ranks ------------------------------------------------------------------------------------------------------


def passes_case(mesh: Mesh, request: dict[str, Any]) -> LayerSamples:
    return measure_layer(LayerRequest.of(request), mesh, SleepingDevice())


def test_passes_on_ranks(ranks: Any) -> None:
    asked = LayerRequest(link=LinkConfig(), rows=64, experts=8, width=16, degrees=[(1, 1), (2, 3)], rounds=2)
    found = ranks.run(2, passes_case, json.loads(json.dumps(asdict(asked))))
    for one in found:
        assert [len(times) for times in one.forward_s] == [2, 2]
        assert [len(times) for times in one.backward_s] == [2, 2]
        assert one.experts == 4
        assert 64 <= one.computed <= 128
    assert (found[0].travelling, found[0].computed) == (found[1].travelling, found[1].computed)
    slowest = LayerSamples.slowest(found)
    assert slowest.forward_s[1][0] == max(one.forward_s[1][0] for one in found)


# The command ------------------------------------------------------------------------------------------------


def test_search(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "pipemoe", "--search", "50", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["cases_count"], found["disagreements_count"]) == (50, 0)
    assert sum(one["cases_count"] for one in found["degrees"]) == 50


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"rounds": 0}, {"slowdown": 0.0}])
def test_bad_input(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        PipelineBench(**wrong)
