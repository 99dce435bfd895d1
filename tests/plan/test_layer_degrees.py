"""The chunks of a planned run's layers: costs and work by hand, and the best number of chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tierstore.cache.access import Phase
from tierstore.machine_profile import ASSUMED, Cost, Profile
from tierstore.parallel.pipeline_degree import PipelineCosts, Share, pass_seconds
from tierstore.plan.capacity import Setting, capacity
from tierstore.plan.layer_degrees import LayerDegrees, layer_degrees
from tierstore.plan.traffic import step_traffic
from tierstore.plan.workload import StepWorkload

Make = Callable[..., Setting]

PROFILE = replace(
    ASSUMED,
    exchanges={2: Cost(0.001, 1e6), 4: Cost(0.003, 2e6)},
    expert_forward=Cost(0.0002, 1e9),
    expert_backward=Cost(0.0004, 1e9),
)


def _found(setting: Setting, profile: Profile = PROFILE) -> LayerDegrees | None:
    taken = capacity(setting)
    return layer_degrees(StepWorkload(setting, taken, step_traffic(setting, taken), profile))


def test_one_rank_sends_nothing(setting: Make) -> None:
    assert _found(setting()) is None


def test_work_by_hand(setting: Make) -> None:
    """2 ranks, 16 tokens each of 12 experts: 192 rows of 16 x 4 B, half of which stay. 6 experts a rank, each of 32 rows and
    3 x 16 x 32 parameters: 2 operations for each forward.
    """
    found = _found(setting({"model.compute_dtype": "fp32"}, ranks=2))
    assert found is not None
    assert found.most == 6
    forward, backward = found.passes
    assert (forward.phase, backward.phase) == (Phase.FORWARD, Phase.BACKWARD)
    assert forward.costs == PipelineCosts(0.001, 1 / 1e6, 0.0002, 1.0)
    assert forward.work.dispatch == forward.work.combine == Share(1, 96 * 64)
    flops = 2 * 32 * 3 * 16 * 32
    assert forward.work.experts.amount == pytest.approx(6 * (0.0002 + flops / 1e9))
    assert backward.work.dispatch == backward.work.combine == Share(2, 96 * 64 + 96 * 4)
    assert backward.work.experts.amount == pytest.approx(6 * (0.0004 + 2 * flops / 1e9))


def test_rows_are_sent_again_where_none_are_kept(setting: Make) -> None:
    kept = _found(setting(ranks=2))
    again = _found(setting({"model.expert_activations": "recompute"}, ranks=2))
    assert kept is not None
    assert again is not None
    assert again.passes[1].work.dispatch.starts == 3
    assert again.passes[1].work.dispatch.amount > 1.5 * kept.passes[1].work.dispatch.amount
    assert again.passes[0] == kept.passes[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_best_number_is_the_least_of_all(setting: Make, ranks: int) -> None:
    found = _found(setting(ranks=ranks))
    assert found is not None
    for one in found.passes:
        seconds = [pass_seconds(one.costs, one.work, degree) for degree in range(1, found.most + 1)]
        assert one.best.seconds == min(seconds)
        assert one.best.degree == 1 + seconds.index(min(seconds))
        told: dict[str, Any] = found.as_json()[one.phase.name.lower()]
        assert (told["chunks_count"], told["one_chunk_s"]) == (one.best.degree, seconds[0])


def test_a_limited_link_is_the_slower_of_two(setting: Make) -> None:
    """As fast as 10 kB/s after 50 ms: dear to start, so fewer chunks than over the machine's own."""
    limits = {"links.exchange.bandwidth": 10_000, "links.exchange.latency": 0.05}
    found = _found(setting(limits, ranks=2))
    assert found is not None
    assert found.passes[0].costs.alpha_a == 0.05
    assert found.passes[0].costs.beta_a == pytest.approx(1e-4)
