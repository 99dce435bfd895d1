"""Slots of a device as a cache: what is copied and when, what the host cache is spared, and that no bit depends on it."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore._native import GroupOrder, policy_names
from tierstore.cache import CacheConfig
from tierstore.prefetch import PredictorName, StepTiming
from tierstore.store import Group
from tierstore.trace.files import load_trace, read_header
from tierstore.trace.replay import replay

MakeRig = Callable[..., Any]
LAYERS, EXPERTS = (0, 2), 4
ALL = len(LAYERS) * EXPERTS
EVERY = tuple(range(EXPERTS))
#: What a lookahead of 8 records takes.
AHEAD = 8 * 5 * 4096


def step(rig: Any, *, micro_batches: int = 1, seed: int = 0, deferred: bool = False) -> list[torch.Tensor]:
    """One training step that reaches every expert in each pass; returns the weights that its forward passes saw."""
    seen = []
    random = torch.Generator().manual_seed(seed)
    with rig.store.optimizer_step(0.01):
        for micro in range(micro_batches):
            rig.experts.begin_micro(index=micro, count=micro_batches)
            for layer in LAYERS:
                weights = rig.forward(layer, *EVERY)
                seen += [weights[expert] for expert in EVERY]
            for layer in reversed(LAYERS):
                gradients = {expert: torch.randn(1024, generator=random) for expert in EVERY}
                rig.backward(layer, gradients)
        if deferred:
            rig.experts.gradients.apply(1.0)
    return seen


def uploads(rig: Any, run: Callable[[], object]) -> int:
    before = rig.tier.uploads
    run()
    return int(rig.tier.uploads - before)


def resident(rig: Any, layer: int) -> list[int]:
    """The experts of ``layer`` that slots hold, in program order."""
    return [
        expert for expert in EVERY if rig.experts.walk.slots.holds([rig.store.record(f"{layer}.{expert}")])[0]
    ]


def test_what_a_slot_holds_is_not_copied_again(make_rig: MakeRig) -> None:
    """Two slots, LRU. Forward over experts 0 and 1 of layer 0 copies both. The backward pass finds both. It steps them, so
    their copies are given up, and the next forward pass copies both again.
    """
    rig = make_rig(slots=2, cache=CacheConfig(policy="lru"))
    with rig.store.optimizer_step(0.01):
        rig.experts.begin_micro(index=0, count=1)
        assert uploads(rig, lambda: rig.forward(0, 0, 1)) == 2
        zeros = {0: torch.zeros(1024), 1: torch.zeros(1024)}
        assert uploads(rig, lambda: rig.backward(0, zeros)) == 0
        assert resident(rig, 0) == []
    rig.experts.begin_micro(index=0, count=1)
    assert uploads(rig, lambda: rig.forward(0, 0, 1)) == 2


def test_the_host_cache_is_spared_what_a_slot_holds(make_rig: MakeRig) -> None:
    """Evaluation with a slot for each expert: the second pass requests nothing of the host cache."""
    rig = make_rig(slots=ALL)
    rig.experts.begin_evaluation()
    for layer in LAYERS:
        rig.forward(layer, *EVERY)
    before = rig.store.cache.residency.stats()
    rig.experts.begin_evaluation()
    for layer in LAYERS:
        weights = rig.forward(layer, *EVERY)
        assert all(torch.equal(weights[expert], rig.initial(layer, expert)) for expert in EVERY)
    after = rig.store.cache.residency.stats()
    assert (after.hits, after.misses, after.accesses) == (before.hits, before.misses, before.accesses)


@pytest.mark.parametrize("room", [2, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_slots_cost_no_reads_where_steps_follow(make_rig: MakeRig, room: int, micro_batches: int) -> None:
    """The host cache, which every step needs, sees each use of what it has: with a slot for each expert it reads no more
    than with one slot, which keeps nothing from pass to pass.
    """
    read = []
    for slots in (1, ALL):
        rig = make_rig(slots=slots, room=room, depth=2, predictor=PredictorName.ALL, lookahead=AHEAD // 8)
        for seed in range(4):
            step(rig, micro_batches=micro_batches, seed=seed)
        read.append(rig.store.cache.residency.stats().read_bytes)
    assert 0 < read[1] <= read[0]


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("policy", ["lru", "next-use"])
def test_copies_of_a_step_where_all_are_stepped(
    make_rig: MakeRig, slots: int, micro_batches: int, policy: str
) -> None:
    """2M passes over E experts, every second one in the opposite order of layers: the S that were used last are there when
    the order turns, so 2ME - (2M - 1)S copies, and E where all fit. Of fewer slots than a layer's experts, one is for those
    that are not there.
    """
    rig = make_rig(slots=slots, cache=CacheConfig(policy=policy))
    for seed in range(3):
        step(rig, micro_batches=micro_batches, seed=seed)
    passes, kept = 2 * micro_batches, slots if slots >= EXPERTS else slots - 1
    copied = uploads(rig, lambda: step(rig, micro_batches=micro_batches, seed=3))
    assert copied == passes * ALL - (passes - 1) * kept


def evaluations(rig: Any) -> int:
    """The copies of an evaluation in which each expert is used once, after four like it."""

    def evaluate() -> None:
        rig.experts.begin_evaluation()
        for layer in LAYERS:
            rig.forward(layer, *EVERY)

    for _ in range(4):
        evaluate()
    return uploads(rig, evaluate)


@pytest.mark.parametrize("policy", policy_names())
def test_copies_where_nothing_changes(make_rig: MakeRig, policy: str) -> None:
    """No policy can keep more than S of the E experts from pass to pass. With a slot for each, nothing is copied."""
    for slots in (1, 3, 6, 7):
        assert evaluations(make_rig(slots=slots, cache=CacheConfig(policy=policy))) >= ALL - slots
    assert evaluations(make_rig(slots=ALL, cache=CacheConfig(policy=policy))) == 0


@pytest.mark.parametrize("slots", [5, 6, 7])
def test_next_use_keeps_what_the_layer_that_computes_does_not_need(make_rig: MakeRig, slots: int) -> None:
    """Forward passes alone go round, which LRU is the worst for. A layer's experts take four slots while it is walked, so
    next-use keeps at least S - 4 of the E experts from pass to pass.
    """
    assert evaluations(make_rig(slots=slots, cache=CacheConfig(policy="next-use"))) <= ALL - (slots - EXPERTS)


@settings(max_examples=25, deadline=None)
@given(
    slots=st.integers(1, 9),
    policy=st.sampled_from(["lru", "lfu-decay", "next-use", "sieve", "learned-use", "arc"]),
    room=st.sampled_from([2.0, 3.5, 8.0]),
    deferred=st.booleans(),
    depth=st.integers(0, 3),
    micro_batches=st.integers(1, 2),
)
def test_no_bit_depends_on_the_slots(
    slots: int, policy: str, room: float, deferred: bool, depth: int, micro_batches: int, request: Any
) -> None:
    """The weights that every pass of three steps sees are those that are computed with in the host cache."""
    make_rig = request.getfixturevalue("make_rig")
    seen = []
    for count in (None, slots):
        rig = make_rig(
            StepTiming.DEFERRED if deferred else StepTiming.IMMEDIATE,
            room=room,
            depth=depth,
            predictor=PredictorName.ALL,
            lookahead=int(AHEAD * room / 16),
            slots=count,
            cache=CacheConfig(policy=policy),
        )
        seen.append(
            [
                weights
                for number in range(3)
                for weights in step(rig, micro_batches=micro_batches, seed=number, deferred=deferred)
            ]
        )
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_the_next_layer_is_copied_while_this_one_computes(make_rig: MakeRig) -> None:
    """All four experts of layer 2 are predicted, and there are slots for them: when the pass of layer 0 has ended, their
    copies are queued, and the pass of layer 2 queues none.
    """
    rig = make_rig(slots=ALL, depth=1, predictor=PredictorName.ALL, lookahead=AHEAD)
    rig.experts.begin_micro(index=0, count=1)
    assert uploads(rig, lambda: rig.forward(0, *EVERY)) == ALL
    assert resident(rig, 2) == list(EVERY)
    assert uploads(rig, lambda: rig.forward(2, *EVERY)) == 0


def test_speculation_leaves_the_expert_that_computes_a_slot(make_rig: MakeRig) -> None:
    """Three slots: while the last expert of layer 0 is computed, the first two of layer 2 are on their way."""
    rig = make_rig(slots=3, depth=1, predictor=PredictorName.ALL, lookahead=AHEAD)
    rig.experts.begin_micro(index=0, count=1)
    for lease in rig.experts.forward(0, EVERY):
        if lease.expert == EXPERTS - 1:
            assert resident(rig, 2) == [0, 1]
    assert len(resident(rig, 2)) in (2, 3)


@pytest.mark.parametrize("slots", [2, 3])
def test_a_slot_is_for_this_pass_before_a_coming_one(make_rig: MakeRig, slots: int) -> None:
    """Slots hold the first experts of layer 0 when its pass begins. Each that has been computed makes room for the next of
    layer 0 that no slot has, not for layer 2: while an expert is computed, all other slots hold those that follow it.
    """
    rig = make_rig(slots=slots, room=2 * ALL, depth=1, predictor=PredictorName.ALL, lookahead=AHEAD)
    step(rig)
    rig.experts.begin_micro(index=0, count=1)
    assert len(resident(rig, 0)) == slots - 1
    for lease in rig.experts.forward(0, EVERY):
        following = EVERY[lease.expert + 1 :][: slots - 1]
        assert set(following) <= set(resident(rig, 0)), lease.expert


@pytest.mark.parametrize("depth", [1, 3])
def test_an_expert_whose_step_is_still_to_be_queued_is_not_copied_ahead(
    make_rig: MakeRig, depth: int
) -> None:
    """The backward pass of layer 2 looks ahead to that of layer 0, and, as all experts fit, to the next step's forward
    passes at any depth. The weights of layer 0's experts change in between: each is copied once its step is queued, and
    there it still is.
    """
    rig = make_rig(slots=ALL + 1, depth=depth, predictor=PredictorName.ALL, lookahead=AHEAD)
    zeros = {expert: torch.zeros(1024) for expert in EVERY}
    with rig.store.optimizer_step(0.01):
        rig.experts.begin_micro(index=0, count=1)
        for layer in LAYERS:
            rig.forward(layer, *EVERY)
        assert (
            uploads(rig, lambda: rig.backward(2, zeros)) == EXPERTS
        )  # of layer 2, once each had been stepped
        assert uploads(rig, lambda: rig.backward(0, zeros)) == EXPERTS
        assert (resident(rig, 0), resident(rig, 2)) == (list(EVERY), list(EVERY))
    rig.experts.begin_micro(index=0, count=1)
    assert uploads(rig, lambda: [rig.forward(layer, *EVERY) for layer in LAYERS]) == 0


@pytest.mark.parametrize(
    ("slots", "depth", "predictor", "copied"),
    [
        (ALL, 1, PredictorName.ALL, [4, 3]),  # not the last one: a slot is left for the current expert
        (ALL - 1, 1, PredictorName.ALL, [1, 4]),  # layer 0's: the one without a slot, then the nearest pass's
        (ALL, 0, PredictorName.ALL, [0, 0]),
        (ALL, 1, PredictorName.NONE, [0, 0]),
    ],
)
def test_a_stepped_expert_is_copied_again_at_once_if_all_fit(
    make_rig: MakeRig, slots: int, depth: int, predictor: PredictorName, copied: list[int]
) -> None:
    """Steps are queued in the backward passes of layers 2 and 0. If all experts fit, and the next forward pass is expected
    to use them, their copies are queued then, behind the steps. A step has 2E - S copies, whenever they are queued.
    """
    rig = make_rig(slots=slots, depth=depth, predictor=predictor, lookahead=AHEAD)
    zeros = {expert: torch.zeros(1024) for expert in EVERY}
    step(rig)
    begun = rig.tier.uploads
    with rig.store.optimizer_step(0.01):
        rig.experts.begin_micro(index=0, count=1)
        for layer in LAYERS:
            rig.forward(layer, *EVERY)
        assert [uploads(rig, partial(rig.backward, layer, zeros)) for layer in (2, 0)] == copied
        assert resident(rig, 2) == (list(EVERY) if copied[0] == 4 else [])
    step(rig)
    assert rig.tier.uploads - begun == 2 * (2 * ALL - slots)


def test_a_stepped_expert_that_is_not_expected_again_is_not_copied_again(make_rig: MakeRig) -> None:
    """Three passes of layer 0 do not use expert 0, so the history does not expect it: the step that it takes then changes
    its slot's content for no pass in sight.
    """
    rig = make_rig(slots=ALL, depth=1, predictor=PredictorName.HISTORY, lookahead=AHEAD)
    for experts in ((1, 2), (1, 2), (1, 2), (0, 1, 2)):
        with rig.store.optimizer_step(0.01):
            rig.experts.begin_micro(index=0, count=1)
            rig.forward(0, *experts)
            rig.backward(0, {expert: torch.zeros(1024) for expert in experts})
    assert resident(rig, 0) == [1, 2]


def test_a_copy_whose_read_hangs_holds_no_other_up(make_rig: MakeRig) -> None:
    """The copy of expert 0 of layer 2 follows a ticket that does not finish; expert 1's is computed with meanwhile."""
    rig = make_rig(slots=ALL, depth=1, predictor=PredictorName.ALL, lookahead=AHEAD)
    engine, cache = rig.store.engine, rig.store.cache
    ticket = engine.external()
    cache.wrote(rig.store.record("2.0").entry(Group.WEIGHTS), ticket)
    rig.experts.begin_micro(index=0, count=1)
    rig.forward(0, *EVERY)
    assert torch.equal(rig.forward(2, 1)[1], rig.initial(2, 1))
    timer = threading.Timer(0.02, engine.complete_external, [ticket])
    timer.start()
    assert torch.equal(rig.forward(2, 0)[0], rig.initial(2, 0))
    timer.join()


def test_a_wrong_guess_gives_its_slots_up(make_rig: MakeRig) -> None:
    """Two slots; layer 2 is guessed to use all, and uses one: the guess for it is not held beyond its pass."""
    rig = make_rig(slots=2, depth=1, predictor=PredictorName.ALL, lookahead=AHEAD)
    rig.experts.begin_micro(index=0, count=1)
    rig.forward(0, 0)
    rig.forward(2, 3)
    core = rig.experts.walk.slots.residency
    held = [number for number in range(ALL) if core.state(4 * number).held]
    assert len(held) <= 1


def test_the_decisions_do_not_depend_on_time(make_rig: MakeRig) -> None:
    """With every copy slow, the core is asked for the same, and decides the same."""

    def run(delay: float) -> tuple[Any, list[int]]:
        rig = make_rig(slots=3, room=3.5, depth=2, predictor=PredictorName.ALL, lookahead=AHEAD // 4)
        load = rig.tier.load

        def slow(slot: int, source: Any, after: Any) -> int:
            ticket = rig.store.engine.external(after=[])
            threading.Timer(delay, rig.store.engine.complete_external, [ticket]).start()
            return int(load(slot, source, [*after, ticket]))

        if delay:
            rig.tier.load = slow
        for number in range(2):
            step(rig, micro_batches=2, seed=number)
        core = rig.experts.walk.slots.residency
        return core.stats(), core.resident_entries().tolist()

    assert run(0.0) == run(0.002)


def test_what_slots_hold_is_not_lost_to_what_comes_before_it(make_rig: MakeRig) -> None:
    """Two slots, experts 2 and 3 in them. A pass over all, by key as replicas walk, computes 0 and 1 first: one slot is
    theirs in turns, and expert 2 keeps the other until it has been computed.
    """
    rig = make_rig(slots=2, order=GroupOrder.KEY, cache=CacheConfig(policy="lru"))
    rig.experts.begin_evaluation()
    rig.forward(0, 2, 3)
    rig.experts.begin_evaluation()
    order = [lease.expert for lease in rig.experts.forward(0, EVERY)]
    assert order == list(EVERY)
    assert rig.tier.uploads == 2 + 3


def test_headroom_that_leaves_no_slot_keeps_nothing(make_rig: MakeRig) -> None:
    """The paper's LFU leaves a frame empty; of one slot it leaves none, so the slot keeps no expert."""
    cache = CacheConfig(options={"variant": "paper"})
    assert cache.headroom_frames == 1
    rig = make_rig(slots=1, cache=cache)
    rig.experts.begin_evaluation()
    assert uploads(rig, lambda: rig.forward(0, 0)) == 1
    assert uploads(rig, lambda: rig.forward(0, 0)) == 1
    assert make_rig(slots=2, cache=cache).experts.walk.slots.keeps


@pytest.mark.parametrize("slots", [1, 3, ALL // 2, ALL])
@pytest.mark.parametrize("policy", ["lru", "lfu-decay", "next-use"])
def test_the_traces_of_both_caches_replay_exactly(
    make_rig: MakeRig, tmp_path: Path, slots: int, policy: str
) -> None:
    """A host cache that has to read, and slots with a policy of their own."""
    rig = make_rig(
        slots=slots,
        room=3.5,
        depth=2,
        predictor=PredictorName.ALL,
        lookahead=AHEAD // 4,
        cache=CacheConfig(policy="sieve", device_policy=policy),
        trace=tmp_path / "run.trace",
    )
    for number in range(3):
        step(rig, micro_batches=2, seed=number)
    rig.store.end_trace()
    host, device = replay(tmp_path / "run.trace"), replay(tmp_path / "run.device-1.trace")
    assert host == rig.store.cache.residency.stats()
    assert device == rig.experts.walk.slots.residency.stats()
    assert device.misses + device.prefetch_reads == rig.tier.uploads
    with (tmp_path / "run.trace").open("rb") as file:
        header = read_header(file)
    assert (header.slot_traces, header.of_slots) == (("run.device-1.trace",), False)


@pytest.mark.parametrize("slots", range(2, ALL + 1))
def test_decoding_copies_what_a_cache_of_its_size_misses(make_rig: MakeRig, slots: int) -> None:
    """Tokens of two experts a layer, against LRU written down as a list: the last one was used last."""
    rig = make_rig(slots=slots, cache=CacheConfig(policy="lru"), depth=0)
    rig.experts.begin_evaluation()
    random = Random(slots)
    held: list[tuple[int, int]] = []
    for _ in range(20):
        for layer in LAYERS:
            chosen = sorted(random.sample(EVERY, 2))
            keys = [(layer, expert) for expert in chosen]
            missing = len(set(keys) - set(held))
            keys.sort(key=lambda key: key not in held)  # a pass computes what slots hold first
            others = [key for key in held if key not in keys]
            held = others[max(len(others) - (slots - len(keys)), 0) :] + keys
            before = rig.tier.uploads
            rig.forward(layer, *chosen)
            assert rig.tier.uploads - before == missing


@pytest.mark.parametrize("slots", [2, 3, 5, ALL])
def test_a_replay_with_another_policy_copies_what_a_run_with_it_copies(
    make_rig: MakeRig, tmp_path: Path, slots: int
) -> None:
    """The order of each pass is that of the keys, so it does not depend on what slots hold. Steps make copies stale that
    only the other policy kept, and a pass requests experts that only one of them has.
    """
    copied = {}
    for policy in ("lru", "sieve", "next-use"):
        trace = tmp_path / f"{policy}.trace"
        cache = CacheConfig(policy="lru", device_policy=policy)
        rig = make_rig(slots=slots, order=GroupOrder.KEY, cache=cache, trace=trace)
        for number in range(3):
            step(rig, micro_batches=2, seed=number)
        rig.store.end_trace()
        copied[policy] = rig.tier.uploads
    for recorded in copied:
        for policy, uploads in copied.items():
            path = tmp_path / f"{recorded}.device-1.trace"
            stats = replay(path, replace(load_trace(path).header, policy=policy))
            assert stats.misses + stats.prefetch_reads == uploads


def test_nothing_is_recorded_of_slots_that_keep_nothing(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(trace=tmp_path / "run.trace")
    step(rig)
    rig.store.end_trace()
    assert [path.name for path in tmp_path.glob("*.trace")] == ["run.trace"]


def test_a_policy_of_its_own(make_rig: MakeRig) -> None:
    rig = make_rig(slots=3, cache=CacheConfig(policy="lfu-decay", device_policy="lru"))
    assert rig.experts.walk.slots.residency.policy == "lru"
    assert rig.store.cache.residency.policy == "lfu-decay"
