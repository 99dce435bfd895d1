"""Which layouts there are, which can be, and what a comparison of them says."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slowness import mostly_slow
from small_config import SMALL_QWEN3_MOE

from tierstore.cache.access import Phase
from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.hf.describing import describe_config
from tierstore.hf.spec import hf_spec
from tierstore.links import LinkConfig, LinksConfig
from tierstore.model.config import ComputeDtype
from tierstore.parallel.config import ExchangeMode, ParallelConfig, RowPlacement
from tierstore.parallel.launching import check_exchange
from tierstore.parallel.layout import Layout, RankEnvironment, layout_of
from tierstore.plan import ASSUMED, Cost
from tierstore.plan.layout_workload import LayoutChoice, degrees_of, stage_workloads
from tierstore.plan.layouts import (
    best_of_each_kind,
    candidates,
    compare_layouts,
    layout_cost,
    layouts_of,
    obstacle,
    pipeline_seconds,
)
from tierstore.plan.predict import simulated
from tierstore.tiers.slots import DeviceKind
from tierstore.train.combinations import Compatibility, Feature, check_combination, pairing
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder

#: Experts take about as long as their rows travel over ``LINKS``.
SLOW = replace(ASSUMED, expert_flops=Cost(1e-5, 2e8), dense_flops=Cost(1e-5, 2e8))


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


@pytest.fixture
def imported() -> TrainConfig:
    """A run of a small model of transformers, of three layers."""
    config = {**SMALL_QWEN3_MOE, "tie_word_embeddings": False}
    spec = hf_spec(describe_config(config, ComputeDtype.FP32), config)
    settings = {"host_budget": 64 << 20, "data.batch_size": 4, "data.micro_batches": 2}
    return replace(load(TrainConfig, None, settings), model=spec)


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
        assert why in found
    layered = LayoutChoice(Layout(2, 1, 1, 1), order=MicroOrder.LAYER)
    assert "1F1B" in (obstacle(config, layered, 4) or "")
    many = LayoutChoice(Layout(1, 1, 2, 1), degree=33)
    assert "parallel.pipeline_degree: expected auto, auto-split or at most 32" in (
        obstacle(config, many, 4) or ""
    )


def test_what_differs_is_a_candidate() -> None:
    """On two nodes of two ranks: tables of several data ranks either way, each for itself; two steps where an expert group
    has several ranks on each of several nodes (tensor-parallel ones are refused); both orders where the run chooses.
    """
    found = list(candidates(configured(), 4, 2))
    assert len(set(found)) == len(found)
    two_steps = {choice.ranks for choice in found if choice.exchange is ExchangeMode.HIERARCHICAL}
    assert two_steps == {Layout(1, 1, 4, 1), Layout(1, 1, 4, 4)}
    for layout in layouts_of(4):
        tables = {(choice.embedding, choice.head) for choice in found if choice.ranks == layout}
        assert len(tables) == (4 if layout.data > 1 else 1)
        assert {choice.order for choice in found if choice.ranks == layout} == set(MicroOrder) - {
            MicroOrder.AUTO
        }
    for order in (MicroOrder.MICRO, MicroOrder.LAYER):
        asked = candidates(configured({"data.micro_order": order.value}), 4, 2)
        assert {choice.order for choice in asked} == {order}
    assert {choice.order for choice in candidates(configured({"data.micro_batches": 1}), 4, 2)} == {
        MicroOrder.MICRO
    }


#: Rows over a link of their own; over the one of the gathers; and over one between nodes, on which two steps pay.
LINKS: dict[str, dict[str, Any]] = {
    "apart": {"links.exchange.bandwidth": 4_000_000, "links.exchange.latency": 1e-4},
    "with gathers": {"links.gather.bandwidth": 4_000_000, "links.gather.latency": 1e-4},
    "between nodes": {
        "links.exchange.bandwidth": 4_000_000,
        "links.node.bandwidth": 2_000_000,
        "links.node.latency": 2e-3,
    },
}


@pytest.mark.parametrize("links", mostly_slow(LINKS, "apart"))
def test_no_valid_layout_is_faster(links: str) -> None:
    """Every layout, number of chunks, exchange, table and order that a run would take, against what is proposed; and what
    is proposed is what a run would take.
    """
    settings = {"model.n_layers": 2, "data.micro_batches": 2, **LINKS[links]}
    config, node_ranks = configured(settings), 2
    found = compare_layouts(config, SLOW, ranks=4, node_ranks=node_ranks)
    valid = list(every_valid(config, 4, node_ranks))
    proposed = {cost.choice for cost in found.costs}
    assert proposed <= set(valid)
    for choice in proposed:
        told = configured(settings | choice.settings | {"parallel.node_ranks": node_ranks})
        assert layout_of(told.parallel, 4) == choice.ranks
        check_combination(told, choice.ranks)
    least = min(
        layout_cost(list(stage_workloads(config, choice, SLOW, node_ranks, known))).step_s
        for known in ({},)
        for choice in valid
    )
    assert found.best.step_s <= least * (1 + 1e-9)
    assert any(cost.choice.degree > 1 and cost.choice.ranks.tensor > 1 for cost in found.costs)
    assert any(
        cost.choice.head is RowPlacement.PARTITIONED for cost in found.costs if cost.choice.ranks.stages > 1
    )


def every_valid(config: TrainConfig, ranks: int, node_ranks: int) -> Iterator[LayoutChoice]:
    """By trying all there is."""
    places, modes = (
        (RowPlacement.GATHERED, RowPlacement.PARTITIONED),
        (ExchangeMode.FLAT, ExchangeMode.HIERARCHICAL),
    )
    orders, counts = (MicroOrder.MICRO, MicroOrder.LAYER), range(1, ranks + 1)
    for stages, expert, tensor in itertools.product(counts, counts, counts):
        for degree, mode, embedding, head, order in itertools.product(
            range(1, config.model.experts + 1), modes, places, places, orders
        ):
            parallel = ParallelConfig(stages=stages, expert=expert, tensor=tensor, pipeline_degree=degree)
            try:
                layout = layout_of(parallel, ranks)
            except ConfigError:
                continue
            choice = LayoutChoice(layout, degree, mode, embedding, head, order)
            environment = RankEnvironment(world=ranks, local_world=node_ranks)
            try:
                check_exchange(choice.configure(config, node_ranks).parallel, environment)
            except ConfigError:
                continue
            if obstacle(config, choice, node_ranks) is None:
                yield choice


def test_imported_models_are_laid_out_as_the_table_says(imported: TrainConfig) -> None:
    """Nothing that the table of combinations refuses is proposed, and nothing is left out without its reason."""
    found = compare_layouts(imported, ASSUMED, ranks=2, node_ranks=2)
    every = {choice.ranks for choice in candidates(imported, 2, 2)}
    assert {cost.choice.ranks for cost in found.costs} | {
        choice.ranks for choice, _ in found.refused
    } == every
    for cost in found.costs:
        check_combination(cost.choice.configure(imported, 2), cost.choice.ranks)
        assert RowPlacement.PARTITIONED not in (cost.choice.embedding, cost.choice.head)
    refused = pairing(Feature.STAGES, Feature.WRAPPED).verdict is Compatibility.REFUSED
    assert any(cost.choice.ranks.stages == 2 for cost in found.costs) is not refused
    reasons = " ".join(why for _, why in found.refused)
    assert pairing(Feature.EMBEDDING, Feature.WRAPPED).why in reasons


def test_the_numbers_of_chunks_that_can_be_best() -> None:
    """Forward and backward passes have a best number each: these, all between, and one chunk are tried."""
    config = configured({"model.experts": 32, "model.top_k": 4, **LINKS["apart"]})
    works = list(stage_workloads(config, LayoutChoice(Layout(1, 1, 2, 1)), SLOW, 2))
    moe = {item.phase: item for item in works[0].passes if item.moe_layer is not None}
    best = [
        min(range(1, 17), key=lambda degree, item=item: works[0].exposed_seconds(item, degree))  # type: ignore[misc]
        for item in moe.values()
    ]
    assert degrees_of(works, 16) == sorted({1, *range(min(best), max(best) + 1)})
    assert degrees_of(works, 1) == [1]
    assert max(best) > 1


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


def test_every_stage_has_its_experts() -> None:
    """Four layers on two stages: layers 2 and 3 are the second one's, under their own numbers."""
    works = stage_workloads(configured(), LayoutChoice(Layout(2, 1, 2, 1)), ASSUMED, 4)
    for work, layers in zip(works, ({0, 1}, {2, 3}), strict=True):
        assert {item.moe_layer for item in work.passes} - {None} == layers
        assert all(work.rows(item).combine.amount > 0 for item in work.passes if item.moe_layer is not None)


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


def test_only_the_last_stage_computes_the_head() -> None:
    """4 sequences of 16 tokens, 256 rows of width 32: 2 T V D operations forward, twice as many backward."""
    config = configured({"data.batch_size": 4})
    works = stage_workloads(config, LayoutChoice(Layout(2, 1, 1, 1)), ASSUMED, 2)
    first, last = (
        [
            work.dense_flops(item)
            for item in work.passes
            if item.unit == 3 and item.phase is not Phase.OPTIMIZER
        ]
        for work in works
    )
    head = 2 * 4 * 16 * 256 * 32
    assert first == [0] * 8
    assert sorted(last) == [head] * 4 + [2 * head] * 4


def test_a_slow_link_between_nodes_is_avoided() -> None:
    """With everything else alike, copies of the experts on each node pay once rows between nodes are dear."""
    links = LinksConfig(node=LinkConfig(bandwidth=1 << 20, latency=1e-3))
    config = configured({"model.d_ff": 16})
    near = compare_layouts(config, ASSUMED, ranks=4, node_ranks=4)
    far = compare_layouts(replace(config, links=links), ASSUMED, ranks=4, node_ranks=2)
    assert near.best.choice.ranks.expert >= far.best.choice.ranks.expert
    wide = next(cost for cost in far.costs if cost.choice.ranks == Layout(1, 1, 4, 1))
    assert wide.step_s > far.best.step_s
    assert wide.sent["sent_across_nodes_bytes"] > 0
    same = next(cost for cost in near.costs if cost.choice.ranks == Layout(1, 1, 4, 1))
    assert same.sent["sent_across_nodes_bytes"] == 0


def test_experts_are_copied_to_an_accelerator() -> None:
    """A step copies all 16 experts up once if they fit there, since each is stepped; with four slots it copies 30."""
    config = configured({"data.micro_batches": 1})
    slow = replace(ASSUMED, copy=Cost(0.0, 1e6))
    choice = LayoutChoice(Layout(1, 1, 1, 1))

    def step_s(device: DeviceKind, memory: int | None = None) -> float:
        works = list(stage_workloads(config, choice, slow, 1, device=device, device_memory=memory))
        return layout_cost(works).step_s

    expert_s = 3 * 32 * 32 * 4 / 1e6
    gradients = 16
    assert step_s(DeviceKind.CUDA, 1 << 40) == pytest.approx((16 + gradients) * expert_s, rel=0.05)
    assert step_s(DeviceKind.CUDA) == pytest.approx((30 + gradients) * expert_s, rel=0.05)
    found = compare_layouts(config, slow, ranks=2, node_ranks=2, device=DeviceKind.CUDA)
    assert found.best.step_s > compare_layouts(config, slow, ranks=2, node_ranks=2).best.step_s


def test_what_a_comparison_says() -> None:
    found = compare_layouts(configured(), ASSUMED, ranks=2, node_ranks=2)
    times = [cost.step_s for cost in found.costs]
    assert times == sorted(times)
    assert found.loses(found.best) == 0
    shown = best_of_each_kind(found.costs)
    assert [cost.choice.ranks for cost in shown if cost is found.best] == [found.best.choice.ranks]
    assert {cost.choice.ranks for cost in shown} == set(layouts_of(2))
    plain = json.loads(json.dumps(found.as_json()))
    assert plain["layouts"][0]["loses_ratio"] == plain["layouts"][0]["loses_s"] == 0
    for one, cost in zip(plain["layouts"], found.costs, strict=True):
        assert one["loses_s"] == cost.step_s - found.best.step_s
        assert one["sent_within_node_bytes"] + one["sent_across_nodes_bytes"] == one["sent_bytes"]
    assert {cost.choice.ranks for cost in found.variants()} == {found.best.choice.ranks}
    assert plain["layouts"][0]["settings"] == found.best.choice.settings
    with pytest.raises(ConfigError, match="--node-ranks: expected a divisor of the 4 ranks, got 3"):
        compare_layouts(configured(), ASSUMED, ranks=4, node_ranks=3)
