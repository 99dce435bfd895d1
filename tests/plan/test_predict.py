"""The time of a step: the simulation by hand, and what a run is predicted to take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from traffic_cases import Make, workload_of

from tierstore.cache.access import Phase
from tierstore.machine_profile import ASSUMED, Cost, Evidence, Profile
from tierstore.plan.capacity import capacity
from tierstore.plan.predict import IN_ORDER, outcome, predict, simulate
from tierstore.plan.traffic import step_traffic
from tierstore.prefetch.operations import Kind, Operation, PassSizes, Resource, operations
from tierstore.prefetch.plan import StepTiming
from tierstore.prefetch.schedule import Pass, QueueLimits, Schedule, Unit
from tierstore.tiers.slots import DeviceKind

# Simulated runs: by hand, against bounds, and against a naive loop over clock ticks -------------------------


def op(kind: Kind, seconds: int, *after: int, position: int = 0, due: int = 0) -> Operation:
    """An operation whose bytes are its seconds."""
    return Operation(kind, position, seconds, after, due)


def lasting(operation: Operation) -> float:
    return float(operation.nbytes)


def test_a_pipeline_by_hand() -> None:
    """Three experts are fetched (3 each), copied (1) and computed (2), one after another.

    disk     000111222
    copy        0  1  2
    compute      00 11 22        ends at 12; the disk is what everything waits for
    """
    listed: list[Operation] = []
    for _ in range(3):
        fetch = len(listed)
        listed += [op(Kind.FETCH, 3), op(Kind.LOAD, 1, fetch), op(Kind.EXPERT, 2, fetch + 1)]
    run = simulate(listed, lasting)
    assert list(run.ended) == [3, 4, 6, 6, 7, 9, 9, 10, 12]
    assert run.seconds == 12
    assert [listed[i].kind for i in run.critical_path(8)] == [
        Kind.FETCH,
        Kind.FETCH,
        Kind.FETCH,
        Kind.LOAD,
        Kind.EXPERT,
    ]
    found = outcome(run, 1, steps=1, settled=0)
    assert found.step_s == 12
    assert found.bottleneck is Resource.DISK
    assert found.path_s == {Kind.FETCH: 9, Kind.LOAD: 1, Kind.EXPERT: 2}
    assert found.busy_ratio[Resource.DISK] == 9 / 12
    assert found.busy_ratio[Resource.COPY] == 3 / 12


def test_computation_keeps_the_program_order_and_the_disk_does_not() -> None:
    """The first computation waits for a fetch of 5: the second, ready at once, waits too. Two copies behind the same
    fetches may overtake one another."""
    listed = [
        op(Kind.FETCH, 5),
        op(Kind.DENSE, 1, 0),
        op(Kind.DENSE, 1),
        op(Kind.LOAD, 2, 0),
        op(Kind.LOAD, 2),
    ]
    run = simulate(listed, lasting)
    assert list(run.begun) == [0, 5, 6, 5, 0]


def test_a_disk_serves_in_the_order_of_asking() -> None:
    """A read that follows the write-back of what it evicts lets the one behind it pass while the step (until 2) lasts."""
    listed = [op(Kind.EXPERT_STEP, 2), op(Kind.WRITE, 3, 0), op(Kind.FETCH, 4, 1), op(Kind.FETCH, 5)]
    assert list(simulate(listed, lasting).begun) == [0, 5, 8, 0]


def test_what_may_wait_is_served_last_by_its_due() -> None:
    """While the first step lasts (3), two that may wait become ready, and after them a fourth that may not."""
    listed = [
        op(Kind.EXPERT_STEP, 3),
        op(Kind.EXPERT_STEP, 1, due=9),
        op(Kind.EXPERT_STEP, 1, due=8),
        op(Kind.DENSE, 2),
        op(Kind.EXPERT_STEP, 1, 3),
    ]
    assert list(simulate(listed, lasting).begun) == [0, 5, 4, 0, 3]


def test_steps_are_measured_once_they_have_settled() -> None:
    """The first step fetches for 10, later ones find all there: 1 each."""
    listed = [op(Kind.FETCH, 10)]
    for step in range(4):
        listed.append(op(Kind.DENSE, 1, len(listed) - 1, position=step))
    run = simulate(listed, lasting)
    assert outcome(run, 1, steps=4, settled=1).step_s == 1
    assert outcome(run, 1, steps=4, settled=0).step_s == 14 / 4
    assert outcome(run, 1, steps=4).bottleneck is Resource.COMPUTE
    with pytest.raises(ValueError, match="step 4"):
        outcome(run, 1, steps=5)


def test_an_operation_follows_earlier_ones_only() -> None:
    with pytest.raises(ValueError, match="operation 0 depends on 1"):
        simulate([op(Kind.DENSE, 1, 1), op(Kind.DENSE, 1)], lasting)


# Against an oracle, and bounds ------------------------------------------------------------------------------


def ticks(listed: Sequence[Operation]) -> list[int]:
    """When each ends, by looking at everything at every tick."""
    left: dict[int, int] = {}
    begun: set[int] = set()
    ended: dict[int, int] = {}
    ready: dict[int, int] = {}
    now = 0
    while len(ended) < len(listed):
        settled = False
        while not settled:  # operations of no length end in the tick in which they begin
            settled = True
            for index in [i for i, rest in left.items() if rest == 0]:
                del left[index]
                ended[index] = now
            for index, operation in enumerate(listed):
                if index not in ready and all(before in ended for before in operation.after):
                    ready[index] = now
            for resource in Resource:
                mine = [i for i, operation in enumerate(listed) if operation.resource is resource]
                waiting = [i for i in mine if i not in begun]
                if resource in IN_ORDER:
                    waiting = waiting[:1] if waiting and waiting[0] in ready else []
                else:
                    waiting = sorted(
                        (i for i in waiting if i in ready), key=lambda i: (listed[i].due, ready[i], i)
                    )
                if waiting and not any(i in left for i in mine):
                    begun.add(waiting[0])
                    left[waiting[0]] = listed[waiting[0]].nbytes
                    settled = False
        now += 1
        left = {index: rest - 1 for index, rest in left.items()}
    return [ended[i] for i in range(len(listed))]


@st.composite
def graphs(draw: st.DrawFn) -> list[Operation]:
    listed: list[Operation] = []
    for index in range(draw(st.integers(1, 14))):
        after = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        kind = draw(st.sampled_from(list(Kind)))
        listed.append(op(kind, draw(st.integers(1, 5)), *after, due=draw(st.integers(0, 2))))
    return listed


@settings(max_examples=share(150))
@given(graphs())
def test_as_a_loop_over_ticks_has_it(listed: list[Operation]) -> None:
    assert list(simulate(listed, lasting).ended) == ticks(listed)


@settings(max_examples=share(150))
@given(graphs())
def test_bounds(listed: list[Operation]) -> None:
    """Not less than the busiest resource, nor than the longest chain; not more than one after another."""
    run = simulate(listed, lasting)
    busy = {r: sum(o.nbytes for o in listed if o.resource is r) for r in Resource}
    chain: list[int] = []
    for operation in listed:
        chain.append(operation.nbytes + max((chain[before] for before in operation.after), default=0))
    assert max(*busy.values(), *chain) <= run.seconds <= sum(o.nbytes for o in listed)


@given(graphs())
def test_the_critical_path_has_no_gap(listed: list[Operation]) -> None:
    """Whatever ended last is reached by operations each of which began when the one before it ended."""
    run = simulate(listed, lasting)
    last = max(range(len(listed)), key=lambda i: run.ended[i])
    path = run.critical_path(last)
    assert run.begun[path[0]] == 0
    for before, after in pairwise(path):
        assert run.ended[before] == run.begun[after]
    assert sum(listed[i].nbytes for i in path) == run.seconds


@given(graphs(), st.lists(st.integers(1, 5), min_size=14, max_size=14))
def test_in_program_order_nothing_shorter_makes_it_longer(listed: list[Operation], caps: list[int]) -> None:
    shorter = [
        Operation(o.kind, o.position, min(o.nbytes, cap), o.after)
        for o, cap in zip(listed, caps, strict=False)
    ]
    before = simulate(listed, lasting, in_order=Resource)
    after = simulate(shorter, lasting, in_order=Resource)
    assert all(a <= b for a, b in zip(after.ended, before.ended, strict=True))


# A real schedule --------------------------------------------------------------------------------------------


def _schedule(depth: int, timing: StepTiming) -> Schedule:
    units = (*(Unit(f"block {i}", 8, i) for i in range(4)), Unit("ends", 8))
    return Schedule(units=units, horizontal=QueueLimits(depth), vertical=QueueLimits(depth), timing=timing)


def _step_s(depth: int, timing: StepTiming, rates: Mapping[Resource, float]) -> float:
    schedule = _schedule(depth, timing)

    def sizes(item: Pass) -> PassSizes:
        if item.moe_layer is None:
            return PassSizes(gather=8, reduce=8)
        return PassSizes(gather=8, reduce=8, experts=4, fetch=6, load=2, evict=3)

    def seconds(operation: Operation) -> float:
        return (operation.nbytes or 4) / rates[operation.resource]

    run = simulate(operations(schedule, sizes, steps=4, slots=2), seconds)
    return outcome(run, len(schedule.passes), steps=4).step_s


@pytest.mark.parametrize("timing", StepTiming)
@pytest.mark.parametrize("resource", Resource)
def test_a_faster_resource_shortens_a_step(resource: Resource, timing: StepTiming) -> None:
    """But for Graham's anomalies: who takes the first that is ready may be better off had it come later."""
    rates = dict.fromkeys(Resource, 1.0)
    before = _step_s(1, timing, rates)
    for rate in (1.5, 3.0, 10.0, 100.0):
        after = _step_s(1, timing, rates | {resource: rate})
        assert after <= before * 1.02
        before = min(after, before)


@pytest.mark.parametrize("timing", StepTiming)
def test_looking_ahead_pays(timing: StepTiming) -> None:
    """With links as slow as computation, a step that looks ahead takes less than one that does not."""
    rates = dict.fromkeys(Resource, 1.0)
    assert _step_s(1, timing, rates) < 0.95 * _step_s(0, timing, rates)


# What a step is made of, by hand; and how its time answers to what it is made of ----------------------------


FREE = Cost(0.0, math.inf)
COPIED = {"weights_in_place": "off"}


def _only(**costs: Cost) -> Profile:
    """A machine on which nothing takes time but ``costs``."""
    names = [field.name for field in fields(Profile) if isinstance(getattr(ASSUMED, field.name), Cost)]
    return replace(ASSUMED, **(dict.fromkeys(names, FREE) | costs))


def test_the_bytes_of_passes_by_hand(setting: Make) -> None:
    """Two ranks: each sends half of a block of 1,248 parameters (624, a multiple of 16), gathers and scatters alike; six
    experts of its own, whose weights are 6 KiB, padded to 8. Of 32 tokens each rank has 16, for 12 experts each, of
    16 x 4 bytes, half of them on the other rank.
    """
    work = workload_of(setting(ranks=2))
    forward = work.sizes(Pass(Phase.FORWARD, 1, 0))
    assert (forward.gather, forward.reduce, forward.experts) == (624 * 4, 624 * 4, 6)
    assert (forward.load, forward.to_host) == (0, 0)  # computed with in the host cache
    copied = workload_of(setting(COPIED, ranks=2)).sizes(Pass(Phase.FORWARD, 1, 0))
    assert (copied.load, copied.to_host) == (8192, 0)
    moved = work.traffic.moved_for[Phase.FORWARD, 0]
    assert (forward.fetch, forward.evict) == (round(moved.read / 6), round(moved.written / 6))
    assert forward.dispatch == forward.combine == 16 * 12 * 16 * 4 // 2
    backward = work.sizes(
        Pass(Phase.BACKWARD, 1, 0)
    )  # and a weight of 4 bytes for each of the 96 rows that travel
    assert backward.dispatch == backward.combine == forward.dispatch + 4 * 96
    head = work.sizes(Pass(Phase.BACKWARD, 3))  # 4,112 parameters, padded to 2 x 2,064
    assert (head.gather, head.experts, head.fetch) == (2064 * 4, 0, 0)


@pytest.mark.parametrize(("compute", "nbytes"), [("fp32", 6144), ("bf16", 3072)])
def test_a_gradient_leaves_in_the_type_of_its_slot(setting: Make, compute: str, nbytes: int) -> None:
    work = workload_of(replace(setting({"model.compute_dtype": compute}), device=DeviceKind.CUDA))
    assert work.sizes(Pass(Phase.BACKWARD, 1, 0)).to_host == nbytes


def test_a_step_moves_its_traffic_and_computes_its_flops(setting: Make) -> None:
    work = workload_of(setting())
    listed = operations(work.schedule, work.sizes, steps=1, slots=4)
    later = operations(work.schedule, work.sizes, steps=2, slots=4)[len(listed) :]
    moved = {kind: sum(o.nbytes for o in later if o.kind is kind) for kind in (Kind.FETCH, Kind.WRITE)}
    assert moved[Kind.FETCH] == pytest.approx(work.traffic.read_bytes, rel=0.01)
    assert moved[Kind.WRITE] == pytest.approx(work.traffic.written_bytes, rel=0.01)
    # 32 tokens through every expert of 1,536 parameters: 2 operations forward, 4 backward.
    assert work.expert_flops(Pass(Phase.FORWARD, 1, 0)) == 2 * 32 * 1536
    assert work.expert_flops(Pass(Phase.BACKWARD, 1, 0)) == 4 * 32 * 1536
    assert work.dense_flops(Pass(Phase.FORWARD, 0)) == 0
    assert work.dense_flops(Pass(Phase.FORWARD, 1)) == 2 * 32 * (1248 + 8 * 16)
    assert work.dense_flops(Pass(Phase.BACKWARD, 3)) == 4 * 32 * 256 * 16


def test_computation_alone(setting: Make) -> None:
    """Nothing else takes time: the step is its floating point operations over their rate."""
    flops = 3 * 2 * (2 * 12 * 32 * 1536 + 2 * 32 * (1248 + 8 * 16) + 32 * 256 * 16)
    rate = Cost(0.0, 1e6)
    found = predict(setting(), _only(dense_flops=rate, expert_flops=rate))
    assert found.step_s == pytest.approx(flops / 1e6)
    assert found.bottleneck is Resource.COMPUTE
    assert found.tokens_per_s == pytest.approx(32 / found.step_s)


def test_the_disk_alone(setting: Make) -> None:
    planned = setting()
    found = predict(planned, _only(disk_mixed=Cost(0.0, 1e6)))
    moved = found.traffic.read_bytes + found.traffic.written_bytes
    assert found.step_s == pytest.approx(moved / 1e6, rel=0.01)
    assert found.bottleneck is Resource.DISK


@pytest.mark.parametrize(
    ("link", "kinds"),
    [
        ("gather", {Kind.GATHER, Kind.REDUCE, Kind.ALL_TO_ALL, Kind.DISPATCH, Kind.COMBINE}),
        ("copy", {Kind.LOAD, Kind.COPY_TO_HOST}),
        ("disk", {Kind.FETCH, Kind.WRITE}),
    ],
)
def test_limited_links(link: str, kinds: set[Kind], setting: Make) -> None:
    """What goes over a limited link takes what the link says, and nothing else does."""
    free = workload_of(setting(ranks=2), _only())
    slow = workload_of(
        setting({f"links.{link}.bandwidth": 1000, f"links.{link}.latency": 0.5}, ranks=2), _only()
    )
    for kind in Kind:
        operation = Operation(kind, 0, 2000, ())
        assert free.seconds(operation) == 0.0
        assert slow.seconds(operation) == (2.5 if kind in kinds else 0.0)


def test_many_experts_are_simulated_in_parts(setting: Make) -> None:
    """40 experts go as 16 operations, and take as long as 40."""
    many = {"model.experts": 40, "model.top_k": 40, "host_budget": "8MiB"}
    work = workload_of(setting(many | COPIED))
    assert (work.experts, work.parts(Pass(Phase.FORWARD, 1, 0))) == (40, 16)
    sizes = work.sizes(Pass(Phase.FORWARD, 1, 0))
    assert sizes.load == 8192 * 40 / 16
    load = work.seconds(Operation(Kind.LOAD, 0, sizes.load, ()))
    assert 16 * load == pytest.approx(40 * ASSUMED.copy.seconds(8192))


def test_few_tokens_reach_few_experts(setting: Make) -> None:
    """4 tokens, 1 of 64 experts each: each expert is reached with 1 - (63/64)^4, and the figures say "assumed"."""
    few = {"model.experts": 64, "model.top_k": 1, "model.seq_len": 2, "data.batch_size": 2}
    planned = setting(few | {"prefetch.predictor": "none"})
    traffic = step_traffic(planned, capacity(planned))
    assert traffic.active == pytest.approx(1 - (63 / 64) ** 4)
    assert traffic.evidence is Evidence.ASSUMED
    everything = setting({"model.experts": 64, "model.top_k": 64})
    assert traffic.read_bytes < 0.2 * step_traffic(everything, capacity(everything)).read_bytes
    assert step_traffic(everything, capacity(everything)).evidence is Evidence.FORMULA


@pytest.mark.parametrize("name", ["gather", "disk_mixed", "copy", "adamw", "dense_flops", "expert_flops"])
def test_a_slower_machine_takes_longer(name: str, setting: Make) -> None:
    planned = setting(COPIED, ranks=2)
    cost: Cost = getattr(ASSUMED, name)
    before = predict(planned, ASSUMED).step_s
    after = predict(planned, replace(ASSUMED, **{name: Cost(cost.latency_s * 300, cost.per_s / 300)})).step_s
    assert after > before
