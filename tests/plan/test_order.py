"""What either order of micro-batches takes, by hand and against real runs; and which one a run gets."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from traffic_cases import Make, workload_of

from tierstore.cache.access import Phase
from tierstore.errors import BudgetError, ConfigError
from tierstore.machine_profile import ASSUMED, Cost, Profile, save_profile
from tierstore.plan.capacity import capacity
from tierstore.plan.fitting import Limits, shortest_remedy
from tierstore.plan.order import (
    choose_order,
    compare_orders,
    in_order,
    order_advice,
    order_lines,
    propose_step,
)
from tierstore.plan.predict import predict
from tierstore.plan.report import plan_run
from tierstore.plan.traffic import step_traffic
from tierstore.prefetch.schedule import Pass
from tierstore.stats import Tier
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

LAYER: dict[str, Any] = {"data.micro_batches": 4, "data.micro_order": "layer"}
MICRO: dict[str, Any] = {"data.micro_batches": 4, "data.micro_order": "micro"}
#: A disk on which bytes are all that counts.
SLOW: dict[str, Any] = {"links.disk.bandwidth": 1 << 20}


def test_bytes_of_layer_order_by_hand(setting: Make) -> None:
    """Boundaries of 4 x 8 tokens x 16 x 4 B = 2 KiB, a page each; 4 micro-batches of 2 blocks."""
    taken = capacity(setting(LAYER))
    assert taken.term("block inputs").nbytes == 8 * 4096
    assert taken.term("block inputs").tier is Tier.HOST
    within = capacity(setting(LAYER | {"boundary_budget": 5 * 4096}))
    assert within.term("block inputs").nbytes == 5 * 4096
    assert within.term("block input scratch").nbytes == 3 * 4096
    names = {term.name for term in capacity(setting(MICRO)).terms}
    assert "gradient scratch" in names
    assert "block inputs" not in names
    # Experts are stepped in their one backward pass, so that no gradient waits.
    assert "gradient scratch" not in {term.name for term in taken.terms}
    with pytest.raises(BudgetError, match="boundary_budget"):
        capacity(setting(LAYER | {"boundary_budget": 4 * 4096 - 1}))


def test_activations_by_hand(setting: Make) -> None:
    """Of each of M micro-batches: the graph of one block, four copies of its experts' rows, two of its stream; once, the
    largest expert's scratch and the head.
    """
    spec = setting().config.spec
    tokens, d, rows = 32, 16, 32 * 12
    graph = tokens * d * (9 * 4 + 16) + tokens * (2 * d * 4 + 12 * 24)
    one = graph + rows * 4 * d * 4 + 2 * tokens * d * 4
    once = tokens * (64 + 2 * 32) * 4 + 4 * tokens * 256 * 4
    assert spec.layer_order_bytes(tokens, 4) == 4 * one + once
    assert capacity(setting(LAYER)).term("activations").nbytes == 4 * one + once


def test_layer_order_moves_what_one_micro_batch_does(setting: Make) -> None:
    one, layer, micro = (step_traffic(s, capacity(s)) for s in (setting(), setting(LAYER), setting(MICRO)))
    assert (layer.read_bytes, layer.written_bytes) == (one.read_bytes, one.written_bytes)
    assert micro.read_bytes > 2 * layer.read_bytes


def test_more_tokens_reach_more_experts(setting: Make) -> None:
    few = {"model.experts": 64, "model.top_k": 1, "model.seq_len": 2, "data.batch_size": 2}
    for order, tokens in ((MICRO, 4), (LAYER, 16)):
        planned = setting(few | order)
        assert step_traffic(planned, capacity(planned)).active == pytest.approx(1 - (63 / 64) ** tokens)


def test_passes_of_layer_order_by_hand(setting: Make) -> None:
    """One gather of four micro-batches, and four reductions; a block is computed again, of its experts only the first
    product; spilled block inputs go with the experts.
    """

    layer = workload_of(setting(LAYER | {"boundary_budget": 4 * 4096}, ranks=2))
    one = workload_of(setting(ranks=2))
    forward, backward = Pass(Phase.FORWARD, 1, 0), Pass(Phase.BACKWARD, 1, 0)
    assert layer.sizes(forward).gather == one.sizes(forward).gather
    assert layer.sizes(backward).reduce == 4 * one.sizes(backward).reduce
    assert len(layer.passes) == len(one.passes)
    assert layer.expert_flops(forward) == 4 * one.expert_flops(forward)
    again = 2 * 4 * 32 * 64 * 16
    assert layer.expert_flops(backward) == 4 * one.expert_flops(backward) + again
    assert layer.dense_flops(backward) == 4 * 3 / 2 * one.dense_flops(backward)
    # Half of 4 spilled pages of 8, of which each layer has two; 6 experts a pass.
    kept = setting(LAYER | {"boundary_budget": 4 * 4096}, ranks=2).boundaries
    assert kept.spilled_bytes == 4 * 4096
    moved = layer.traffic.moved_for[Phase.FORWARD, 0]
    assert layer.sizes(forward).evict == round((moved.written + 2 * 4096) / 6)


def test_spilled_block_inputs_of_a_model_without_experts_take_the_disk(setting: Make) -> None:
    """Two blocks, of whose 8 pages 4 are spilled; a disk of 40,960 bytes a second reads and writes one in 0.1 s."""
    planned = setting(LAYER | {"model.moe_every": 0, "boundary_budget": 4 * 4096})
    slow = Cost(0.0, 40_960)
    profile = replace(ASSUMED, disk_read=slow, disk_write=slow, disk_mixed=slow)
    assert predict(planned, profile).step_s == pytest.approx(8 * 0.1, rel=0.05)
    unbounded = setting(LAYER | {"model.moe_every": 0})
    assert predict(unbounded, profile).step_s < 0.1


# The choice ------------------------------------------------------------------------------------------------


def test_one_micro_batch_leaves_nothing_to_choose(setting: Make) -> None:
    config = setting().config
    choice = choose_order(config)
    assert choice.value is MicroOrder.MICRO
    assert order_lines(choice) == []
    assert plan_run(config, Limits(1 << 40, 1 << 40)).as_json()["order"] is None


@pytest.mark.parametrize("order", ["micro", "layer"])
def test_what_is_configured_counts(order: str, setting: Make) -> None:
    config = setting({"data.micro_batches": 4, "data.micro_order": order}).config
    choice = choose_order(config)
    assert (choice.value, choice.reason) == (MicroOrder(order), "as configured")
    assert in_order(config, choice) == config


def test_auto_takes_what_is_faster(setting: Make) -> None:
    slow = setting({"data.micro_batches": 4} | SLOW)
    choice = choose_order(slow.config)
    assert choice.value is MicroOrder.LAYER
    assert in_order(slow.config, choice).data.layer_major
    assert order_lines(choice) == [f"order of 4 micro-batches: layer ({choice.reason})"]
    assert choice.reason.startswith("auto: a step moves ")
    in_memory = setting({"data.micro_batches": 4, "host_budget": "8MiB"} | SLOW)
    found = choose_order(in_memory.config)
    assert found.value is MicroOrder.MICRO
    assert found.facts["layer"].moved_bytes == found.facts["micro"].moved_bytes == 0


def test_auto_without_memory_for_a_layer(setting: Make) -> None:
    choice = choose_order(setting({"data.micro_batches": 4, "boundary_budget": 4096} | SLOW).config)
    assert choice.value is MicroOrder.MICRO
    assert choice.reason == "auto: boundary_budget is too small for layer order"


def test_costs_by_hand(setting: Make) -> None:
    planned = setting({"data.micro_batches": 4, "boundary_budget": 5 * 4096} | SLOW)
    choice = compare_orders(planned, ASSUMED)
    layer = replace(planned, config=in_order(planned.config, choice))
    traffic, taken = step_traffic(layer, capacity(layer)), capacity(layer)
    assert choice.facts["layer"].moved_bytes == traffic.read_bytes + traffic.written_bytes + 2 * 3 * 4096
    assert choice.facts["layer"].memory_bytes == taken.total(Tier.HOST, Tier.DEVICE)
    whole = setting({"data.batch_size": 16, "model.checkpoint_activations": "block"} | SLOW)
    assert choice.facts["one_larger"].memory_bytes == capacity(whole).total(Tier.HOST, Tier.DEVICE)
    advice = order_advice(choice)
    assert advice.startswith("one micro-batch of 4-fold size with checkpoint_activations = block")


def test_a_profile_that_says_otherwise_is_heard(setting: Make, tmp_path: Path) -> None:
    """A run knows parallel.profile only, so the plan says what the run will do, and what would be faster."""
    planned = setting({"data.micro_batches": 4, "host_budget": "300KiB"})
    asked = compare_orders(planned, ASSUMED).value
    slow = replace(ASSUMED, machine="a slow disk", disk_mixed=Cost(0.0, 1e5))
    fast = replace(ASSUMED, machine="a slow processor", dense_flops=Cost(0.0, 1e6), expert_flops=Cost(0, 1e6))
    found = {profile.machine: compare_orders(planned, profile) for profile in (slow, fast)}
    assert {choice.value for choice in found.values()} == {asked}
    other = found["a slow disk" if asked is MicroOrder.MICRO else "a slow processor"]
    assert "order is faster" in other.reason
    # A run chooses by its own profile what a plan by it says.
    own = slow if other is found["a slow disk"] else fast
    save_profile(own, path := tmp_path / "profile.json")
    config = replace(planned.config, parallel=replace(planned.config.parallel, profile=path))
    runs = choose_order(config)
    assert runs.value is not asked
    assert "order is faster" not in runs.reason
    assert runs.facts["layer"].step_s == other.facts["layer"].step_s
    assert runs.value is compare_orders(replace(planned, config=config), ASSUMED).value
    gone = replace(config, parallel=replace(config.parallel, profile=tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"parallel\.profile: .*none\.json"):
        choose_order(gone)


def test_plan_tells_the_choice(setting: Make) -> None:
    config = setting({"data.micro_batches": 4} | SLOW).config
    plan = plan_run(config, Limits(1 << 40, 1 << 40))
    assert plan.setting.config.data.layer_major
    told = plan.as_json()["order"]
    assert told["micro_order"] == "layer"
    assert told["layer"]["moved_bytes"] < told["micro"]["moved_bytes"]
    assert told["one_larger"]["evidence"] == "assumed"


def test_too_little_memory_spills_boundaries_first(setting: Make) -> None:
    """Of what helps, the change that costs least: the same bits, and no more experts are moved."""
    planned = setting(LAYER | {"model.n_layers": 40, "host_budget": "130KiB"})
    total = capacity(planned).total(Tier.HOST, Tier.DEVICE)
    remedy = shortest_remedy(planned, Limits(total - 30 * 4096, 1 << 40))
    assert [change.text for change in remedy.changes] == [f"boundary_budget = {4 * 4096}"]


# Against runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 4, 5])
def test_spilled_block_inputs_change_no_bits(slots: int, setting: Make) -> None:
    """Losses are those of micro order; what goes to disk is what the plan says, in every step."""
    few = {"model.n_layers": 3, "model.top_k": 2, "steps": 3}
    expected = _losses(setting(MICRO | few).config)
    planned = setting(LAYER | few | {"boundary_budget": slots * 4096})
    kept = planned.boundaries
    with open_session(
        replace(planned.config, store=planned.config.store / "layer"), Opening.CREATE
    ) as trainer:
        found = [trainer.step().loss for _ in range(3)]
        moved = trainer.boundaries.written_bytes, trainer.boundaries.read_bytes
    assert found == expected
    assert moved == (3 * kept.spilled_bytes, 3 * kept.spilled_bytes)


def _losses(config: TrainConfig) -> list[float]:
    with open_session(replace(config, store=config.store / "micro"), Opening.CREATE) as trainer:
        return [trainer.step().loss for _ in range(3)]


# The step that hides the disk ------------------------------------------------------------------------------


def _bound(disk_bytes_per_s: float) -> Profile:
    """Nothing takes time but the disk and 1 M operations a second."""
    names = [field.name for field in fields(Profile) if isinstance(getattr(ASSUMED, field.name), Cost)]
    costs = dict.fromkeys(names, Cost(0.0, math.inf))
    costs |= {"dense_flops": Cost(0.0, 1e6), "expert_flops": Cost(0.0, 1e6)}
    return replace(ASSUMED, **costs | {"disk_mixed": Cost(0.0, disk_bytes_per_s)})


@pytest.mark.parametrize("given", [1, 4])
def test_the_step_that_hides_the_disk_by_hand(setting: Make, given: int) -> None:
    """Layer order computes every block four times (forward, again, backward 2), and so the head; an expert three times and
    its first product, 32 tokens x 64 x 16, again. The bytes do not depend on the number of micro-batches.
    """
    dense = 2 * (2 * 32 * (1248 + 8 * 16)) + 2 * 32 * 256 * 16
    experts = 2 * 12 * (3 * 2 * 32 * 1536 + 2 * 32 * 64 * 16)
    micro_s = (4 * dense + experts) / 1e6
    layer = setting(LAYER)
    moved = step_traffic(layer, capacity(layer))
    disk_bytes_per_s = (moved.read_bytes + moved.written_bytes) / (6.5 * micro_s)
    found = propose_step(setting({"data.micro_batches": given}), _bound(disk_bytes_per_s))
    assert (found.micro_batches_count, found.tokens) == (7, 7 * 32)
    assert 7 * micro_s <= found.step_s <= (7 + 6.5) * micro_s
    assert found.tokens_per_s == pytest.approx(7 * 32 / found.step_s)
    assert found.memory_bytes == capacity(setting(LAYER | {"data.micro_batches": 7})).total(
        Tier.HOST, Tier.DEVICE
    )


def test_a_step_is_proposed_where_the_disk_bounds(setting: Make) -> None:
    roomy, slow = Limits(1 << 40, 1 << 40), _bound(1e5)
    found = plan_run(setting().config, roomy, profile=slow).proposed_step
    assert found == propose_step(setting(), slow)
    assert plan_run(setting().config, roomy, profile=_bound(1e9)).proposed_step is None
    stages = setting({"parallel.stages": 2, "data.micro_batches": 2}).config
    assert plan_run(stages, roomy, ranks=2, profile=slow).proposed_step is None


def test_no_step_is_proposed_that_the_budgets_cannot_hold(setting: Make) -> None:
    planned = setting({"boundary_budget": 4 * 4096})
    assert propose_step(planned, _bound(1e3)) is None
