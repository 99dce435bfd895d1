"""The simulated stack: what it would move, how its time answers to its links; and one real case."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prediction import BALANCES, COPIES, StackCalibration, StackWorkload, cases

from tierstore.bench.overlap import (
    CAUGHT_UP,
    Balance,
    Computation,
    RankProcesses,
    RankRequest,
    StackShape,
    links_for,
)
from tierstore.links import LinkConfig, LinksConfig
from tierstore.machine_profile import Cost
from tierstore.prefetch.operations import Resource

SHAPE = StackShape(layers=6, experts=2, dense_side=64, expert_side=64, cached_layers=3.0, forward_s=0.01)
NOTHING = StackCalibration(0.0, 0.0, Cost(0.0, 1e12))


def test_there_are_twelve_cases_and_more_each_with_a_name() -> None:
    found = cases(SHAPE)
    assert len(found) >= 12
    assert len({case.name for case in found}) == len(found)
    assert {case.balance for case in found} == set(BALANCES)


def test_without_limits_a_step_is_its_computation() -> None:
    """6 layers, 10 ms forward and 20 ms backward each."""
    found = StackWorkload(SHAPE, LinksConfig(), NOTHING).run()
    assert found.step_s == pytest.approx(0.18)
    assert found.bottleneck is Resource.COMPUTE


def test_driving_costs_what_was_fitted() -> None:
    """12 dense passes and 24 experts."""
    driven = StackCalibration(0.001, 0.0005, NOTHING.adamw)
    assert StackWorkload(SHAPE, LinksConfig(), driven).run().step_s == pytest.approx(0.18 + 0.012 + 0.012)


@pytest.mark.parametrize(
    ("balance", "bottleneck"),
    [
        (Balance.GATHERS, Resource.GATHER),
        (Balance.FETCHES, Resource.DISK),
        (Balance.COMPUTATION, Resource.COMPUTE),
    ],
)
def test_the_longest_of_the_three_is_the_bottleneck(balance: Balance, bottleneck: Resource) -> None:
    shape = replace(SHAPE, layers=8, cached_layers=4.0)
    sent, moved = StackWorkload(shape, LinksConfig(), NOTHING).moved_bytes()
    computing = 3 * shape.layers * shape.forward_s
    found = StackWorkload(shape, links_for(balance, computing, sent, moved, COPIES * moved), NOTHING).run()
    assert found.bottleneck is bottleneck
    longest = computing if balance is Balance.COMPUTATION else 3 * computing
    assert 0.95 * longest <= found.step_s <= 1.3 * longest


def test_a_slower_link_never_helps() -> None:
    before = 0.0
    for bandwidth in (8 << 20, 4 << 20, 2 << 20, 1 << 20):
        links = LinksConfig(gather=LinkConfig(bandwidth=bandwidth), disk=LinkConfig(bandwidth=bandwidth))
        after = StackWorkload(SHAPE, links, NOTHING).run().step_s
        assert after >= before
        before = after


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses() as started:
        yield started


@pytest.mark.parametrize(
    "differs",
    [
        {},
        pytest.param({"layers": 8, "experts": 4, "cached_layers": 4.0}, marks=pytest.mark.slow),
        pytest.param(
            {"layers": 8, "experts": 4, "cached_layers": 4.0, "vertical_depth": 0}, marks=pytest.mark.slow
        ),
    ],
    ids=["small", "half in cache", "no prefetch"],
)
def test_what_is_predicted_to_move_does(
    tmp_path: Path, ranks: RankProcesses, differs: dict[str, Any]
) -> None:
    """Two real ranks, to the byte."""
    shape = replace(SHAPE, forward_s=0.001, computation=Computation.DEVICE, **differs)
    steps, warmup = 8, 6
    sent, moved = StackWorkload(shape, LinksConfig(), NOTHING, (warmup + CAUGHT_UP, steps)).moved_bytes()
    asked = RankRequest(directory=tmp_path / "run", steps=steps, warmup=warmup, shape=shape)
    found = ranks.measure(asked)
    assert found.sent_bytes == sent
    assert found.disk_bytes == moved
