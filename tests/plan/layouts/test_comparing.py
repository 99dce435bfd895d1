"""Which layouts there are, which can be, and what a comparison of them says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig, LinksConfig
from tierstore.parallel.config import ExchangeMode, RowPlacement
from tierstore.parallel.layout import Layout
from tierstore.plan import ASSUMED, Cost
from tierstore.plan.layouts.candidates import LayoutChoice, candidates, layouts_of, obstacle
from tierstore.plan.layouts.comparing import best_of_each_kind, compare_layouts, layout_cost, pipeline_seconds
from tierstore.plan.layouts.workload import stage_workloads
from tierstore.plan.predict import simulated
from tierstore.train.config import TrainConfig


def configured(changes: dict[str, Any] | None = None) -> TrainConfig:
    small = {
        "host_budget": 8 << 20,
        "model.d_model": 32,
        "model.n_layers": 4,
        "model.d_ff": 32,
        "model.experts": 4,
        "model.top_k": 4,
        "model.seq_len": 16,
        "data.batch_size": 8,
        "data.micro_batches": 4,
    }
    return load(TrainConfig, None, small | (changes or {}))


def test_the_layouts_of_four_ranks() -> None:
    """By stages: four ranks share experts by 1, 2 or 4, those of 2 and 4 with pieces of their own or as tensor ranks."""
    found = [(each.stages, each.data, each.expert, each.tensor) for each in layouts_of(4)]
    one_stage = [(1, 4, 1, 1), (1, 4, 2, 1), (1, 2, 2, 2), (1, 4, 4, 1), (1, 1, 4, 4)]
    assert found == [*one_stage, (2, 2, 1, 1), (2, 2, 2, 1), (2, 1, 2, 2), (4, 1, 1, 1)]


@given(st.integers(1, 24))
def test_layouts_are_all_different_and_of_all_ranks(ranks: int) -> None:
    found = list(layouts_of(ranks))
    assert len(set(found)) == len(found)
    assert all(layout.world == ranks for layout in found)


def test_what_cannot_be_says_why() -> None:
    config = configured()
    assert obstacle(config, LayoutChoice(Layout(2, 1, 2, 1)), 4) is None
    for choice, why in (
        (LayoutChoice(Layout(8, 1, 1, 1)), "expected at least parallel.stages = 8, got 4"),
        (LayoutChoice(Layout(1, 16, 1, 1)), "expected a multiple of the 16 data ranks, got 8"),
        (LayoutChoice(Layout(1, 1, 8, 1)), "expected at most 4 experts, got 8"),
        (LayoutChoice(Layout(1, 1, 3, 3)), "expected a multiple of parallel.tensor = 3"),
    ):
        found = obstacle(config, choice, 4)
        assert found is not None
        assert why in found
    layered = replace(config, data=replace(config.data, micro_order=type(config.data.micro_order).LAYER))
    assert "1F1B" in (obstacle(layered, LayoutChoice(Layout(2, 1, 1, 1)), 4) or "")


def test_exchanges_are_divided_only_where_rows_travel() -> None:
    found = list(candidates(configured(), 4, 2))
    assert {choice.degree for choice in found if choice.ranks.expert == 1 or choice.ranks.tensor > 1} == {1}
    two_steps = {choice.ranks for choice in found if choice.exchange is ExchangeMode.HIERARCHICAL}
    assert two_steps == {Layout(1, 1, 4, 1)}  # alone it has several ranks on each of several nodes
    assert all(choice.degree * choice.ranks.expert <= 4 for choice in found)
    assert not any(c.rows is RowPlacement.PARTITIONED for c in found if c.ranks.stages > 1)


def test_stages_take_the_time_of_one_forward_one_backward() -> None:
    """(M + p - 1) (t_f + t_b) with M = 4 and p = 2 is five fourths of a stage's four micro-batches, of the longest stage at
    most, where messages between stages cost nothing.
    """
    free = replace(ASSUMED, all_to_all=Cost(0.0, 1e30))
    works = list(stage_workloads(configured(), LayoutChoice(Layout(2, 1, 1, 1)), free, 2))
    longest = max(simulated(work).step_s for work in works)
    cost = layout_cost(works)
    assert longest <= cost.step_s <= 5 / 4 * longest * (1 + 1e-9)
    assert cost.bubble_ratio == pytest.approx(1 - longest / cost.step_s)


def test_passes_of_stages_by_hand() -> None:
    """Equal stages; one micro-batch there and back over a slow link; and a first stage that is twice as slow, behind whose
    last forward pass the second stage and the way back remain.
    """
    assert pipeline_seconds([(1, 2), (1, 2)], 4) == (4 + 2 - 1) * 3
    assert pipeline_seconds([(1, 2), (1, 2), (1, 2)], 6) == (6 + 3 - 1) * 3
    assert pipeline_seconds([(1, 2), (1, 2)], 1, 0.5) == 1 + 0.5 + 1 + 2 + 0.5 + 2
    # Stage 0: F0 to 2, F1 to 4, B0 5 to 9 (stage 1: F0 2 to 3, B0 3 to 5), B1 9 to 13.
    assert pipeline_seconds([(2, 4), (1, 2)], 2) == 13


@given(
    passes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    micro_batches=st.integers(1, 6),
    message=st.integers(0, 3),
)
def test_passes_of_stages_are_bounded(
    passes: list[tuple[int, int]], micro_batches: int, message: int
) -> None:
    """No shorter than one micro-batch's way, or any stage's work; no longer than all one after another."""
    found = pipeline_seconds(passes, micro_batches, message)
    each = [sum(both) for both in passes]
    alone = sum(each) + 2 * message * (len(passes) - 1)
    assert alone <= found <= micro_batches * alone
    assert found >= micro_batches * max(each)
    assert micro_batches > 1 or found == alone


def test_a_slow_link_between_nodes_is_avoided() -> None:
    """With everything else alike, copies of the experts on each node pay once rows between nodes are dear."""
    links = LinksConfig(node=LinkConfig(bandwidth=1 << 20, latency=1e-3))
    config = configured({"model.d_ff": 16})
    near = compare_layouts(config, ASSUMED, ranks=4, node_ranks=4)
    far = compare_layouts(replace(config, links=links), ASSUMED, ranks=4, node_ranks=2)
    assert near.best.choice.ranks.expert >= far.best.choice.ranks.expert
    wide = next(cost for cost in far.costs if cost.choice.ranks == Layout(1, 1, 4, 1))
    assert wide.step_s > far.best.step_s
    assert wide.sent.across > 0
    same = next(cost for cost in near.costs if cost.choice.ranks == Layout(1, 1, 4, 1))
    assert same.sent.across == 0


def test_what_a_comparison_says() -> None:
    found = compare_layouts(configured(), ASSUMED, ranks=2, node_ranks=2)
    times = [cost.step_s for cost in found.costs]
    assert times == sorted(times)
    assert found.loses(found.best) == 0
    shown = best_of_each_kind(found.costs)
    assert [cost.choice.ranks for cost in shown if cost is found.best] == [found.best.choice.ranks]
    assert {cost.choice.ranks for cost in shown} == set(layouts_of(2))
    plain = json.loads(json.dumps(found.as_json()))
    assert plain["layouts"][0]["loses_ratio"] == 0
    assert plain["layouts"][0]["settings"] == found.best.choice.settings
    with pytest.raises(ConfigError, match="--node-ranks: expected a divisor of the 4 ranks, got 3"):
        compare_layouts(configured(), ASSUMED, ranks=4, node_ranks=3)
