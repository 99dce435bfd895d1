"""The expert source: what it speculates on, what it counts, what it charges."""

import re
import threading
from collections.abc import Callable
from typing import Any

import torch

from tierstore.prefetch import PredictorName
from tierstore.stats import Cause, Tier
from tierstore.store import Group

MakeRig = Callable[..., Any]
PAGE = 4096
RECORD = 5 * PAGE
NAMES = ("hits", "misses", "prefetch_read_bytes", "useful_prefetch_bytes", "wasted_prefetch_bytes")


def counts(rig: Any) -> tuple[int, ...]:
    stats = rig.store.cache.residency.stats()
    return tuple(getattr(stats, name) for name in NAMES)


def since(rig: Any, before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(counts(rig), before, strict=True))


def emptied(rig: Any) -> tuple[int, ...]:
    """Nothing is resident any more."""
    for layer in (0, 2):
        for expert in range(4):
            for group in (Group.WEIGHTS, Group.MOMENTS):
                entry = rig.store.record(f"{layer}.{expert}").entry(group)
                if rig.store.cache.residency.state(entry).resident:
                    rig.store.cache.drop([entry])
                    rig.store.cache.residency.set_stored(rig.store.record(f"{layer}.{expert}").number, 0b011)
    return counts(rig)


def test_without_lookahead_everything_is_a_demand(make_rig: MakeRig) -> None:
    rig = make_rig(depth=0)
    before = emptied(rig)
    rig.experts.begin_micro(index=0, count=1)
    rig.forward(0, 0, 1)
    rig.forward(2, 3)
    assert since(rig, before) == (0, 3, 0, 0, 0)


def test_the_next_layer_is_read_while_this_one_computes(make_rig: MakeRig) -> None:
    """All four experts of layer 2 (a page each) are on their way; two of them are used."""
    rig = make_rig(depth=1, predictor=PredictorName.ALL, lookahead=4 * RECORD)
    before = emptied(rig)
    rig.experts.begin_micro(index=0, count=1)
    rig.forward(0, 0)
    assert since(rig, before) == (0, 1, 4 * PAGE, 0, 0)
    rig.forward(2, 1, 3)
    # Forward of layer 2 looks at its own backward pass: two moments of each expert that it used.
    assert since(rig, before) == (2, 1, 8 * PAGE, 2 * PAGE, 0)


def test_only_what_is_known_when_nothing_is_predicted(make_rig: MakeRig) -> None:
    rig = make_rig(depth=3, predictor=PredictorName.NONE, lookahead=4 * RECORD)
    with rig.store.optimizer_step(0.01):
        before = emptied(rig)
        rig.experts.begin_micro(index=0, count=1)
        rig.forward(0, 0)
        # Layer 2 has not been routed yet; what layer 0's backward pass needs is known: two moments.
        assert since(rig, before)[2] == 2 * PAGE
        rig.forward(2, 1)
        assert since(rig, before)[1:3] == (2, 4 * PAGE)
        rig.backward(2, {1: torch.zeros(1024)})
        rig.backward(0, {0: torch.zeros(1024)})
        # Both backward passes found weights and moments there, and nothing was guessed for the next step.
        assert since(rig, before) == (4, 2, 4 * PAGE, 4 * PAGE, 0)


def test_the_set_of_an_earlier_micro_batch_is_no_knowledge(make_rig: MakeRig) -> None:
    rig = make_rig(depth=2, predictor=PredictorName.NONE, lookahead=4 * RECORD)
    rig.experts.begin_micro(index=0, count=2)
    rig.forward(0, 0)
    rig.forward(2, 0, 1, 2, 3)
    rig.experts.begin_micro(index=1, count=2)
    before = emptied(rig)
    rig.forward(0, 1)  # depth 2 reaches the backward pass of layer 2, whose experts nobody knows yet
    assert since(rig, before)[2] == 0


def test_a_recomputation_is_not_observed_twice(make_rig: MakeRig) -> None:
    """Expert 0 used, then not: .625, .469. Were the second forward pass of a micro-batch observed as well,
    the first would count twice (.719) and the second leave it above one half (.539)."""
    rig = make_rig(depth=1, predictor=PredictorName.HISTORY, lookahead=4 * RECORD)
    for expert in (0, 1):
        rig.experts.begin_micro(index=0, count=1)
        rig.forward(2, expert)
        if expert == 0:
            rig.forward(2, expert)  # recomputed by activation checkpointing
    rig.experts.begin_micro(index=0, count=1)
    before = emptied(rig)
    rig.forward(0, 0)
    assert since(rig, before)[2] == PAGE  # expert 1 alone


def test_a_stall_is_charged_to_its_cause(make_rig: MakeRig) -> None:
    """Weights that wait for an operation on them; the time is the optimizer's, and the layer's."""
    rig = make_rig()
    rig.experts.begin_micro(index=0, count=1)
    rig.forward(0, 0)
    assert all(row.key.cause is not Cause.OPTIMIZER for row in rig.ledger.rows())
    engine, cache = rig.store.engine, rig.store.cache
    entry = rig.store.record("2.1").entry(Group.WEIGHTS)
    rig.forward(2, 1)
    ticket = engine.external()
    cache.wrote(entry, ticket)
    release = threading.Timer(0.02, engine.complete_external, [ticket])
    release.start()
    rig.experts.begin_micro(index=0, count=1)
    rig.forward(2, 1)
    release.join()
    (row,) = [row for row in rig.ledger.rows() if row.key.cause is Cause.OPTIMIZER]
    assert (row.key.layer, row.key.tier, row.intervals) == (2, Tier.HOST, 1)
    assert row.stall_ns > 0


def test_evaluation_looks_only_forward(make_rig: MakeRig) -> None:
    rig = make_rig(depth=1, predictor=PredictorName.ALL, lookahead=4 * RECORD)
    rig.experts.begin_evaluation()
    before = emptied(rig)
    rig.forward(0, 0)
    rig.forward(2, 0)
    # Layer 2, then layer 0 of the next batch: weights alone, and one of them is resident.
    assert since(rig, before)[2] == 7 * PAGE


def test_weights_of_a_layer_larger_than_the_cache(make_rig: MakeRig) -> None:
    rig = make_rig(room=1.0, depth=2, predictor=PredictorName.ALL, lookahead=2 * PAGE)
    rig.experts.begin_micro(index=0, count=1)
    for layer in (0, 2):
        seen = rig.forward(layer, 0, 1, 2, 3)
        for expert, weights in seen.items():
            assert torch.equal(weights, rig.initial(layer, expert))
    with rig.store.optimizer_step(0.01):
        for layer in (2, 0):
            rig.backward(layer, {expert: torch.ones(1024) for expert in range(4)})
        assert rig.experts.gradients.sum_of_squares() == 8 * 1024.0


def test_a_layer_of_which_no_expert_is_here(make_rig: MakeRig) -> None:
    """On several ranks, one whose experts got no token still passes through every layer."""
    rig = make_rig(depth=1, predictor=PredictorName.HISTORY, lookahead=4 * RECORD)
    with rig.store.optimizer_step(0.01):
        rig.experts.begin_micro(index=0, count=1)
        before = {expert: rig.weight(2, expert) for expert in range(4)}
        for layer in (0, 2):
            assert rig.forward(layer) == {}
        for layer in (2, 0):
            rig.backward(layer, {})
        assert rig.experts.gradients.sum_of_squares() == 0.0
    rig.forward(2, 0, 1, 2, 3)
    for expert, weight in before.items():  # weight decay moved them all the same
        assert not torch.equal(rig.weight(2, expert), weight)


def test_a_slot_is_released_once_its_expert_was_computed_and_before_it_is_loaded_again(
    make_rig: MakeRig,
) -> None:
    """Four experts in two slots. On a device this alone keeps a copy behind what still reads the slot. What a slot holds may
    be computed with more than once.
    """
    rig = make_rig(slots=2)
    device = rig.experts._device
    load, release = device.load, device.release_weights
    events: dict[int, list[str]] = {slot: [] for slot in range(2)}
    slots = {device.weights(slot).data_ptr(): slot for slot in range(2)}

    def loading(slot: int, *args: Any) -> int:
        events[slot].append("load")
        return load(slot, *args)

    def releasing(slot: int) -> None:
        events[slot].append("release")
        release(slot)

    device.load, device.release_weights = loading, releasing
    rig.experts.begin_micro(index=0, count=1)
    with rig.store.optimizer_step(0.1):
        for lease in rig.experts.forward(0, range(4)):
            events[slots[lease.weights.data_ptr()]].append("compute")
        for lease in rig.experts.backward(0, range(4)):
            lease.gradients.zero_()
            events[slots[lease.weights.data_ptr()]].append("compute")
    for happened in events.values():
        assert re.fullmatch(r"(load (compute release )+)+", " ".join([*happened, ""]))
    assert sum(happened.count("compute") for happened in events.values()) == 8
