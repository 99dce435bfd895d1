"""What a step is made of, by hand; and how its time answers to what it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from tierstore.cache.access import Phase
from tierstore.machine_profile import ASSUMED, Cost, Evidence, Profile
from tierstore.plan.capacity import Setting, capacity
from tierstore.plan.predict import predict
from tierstore.plan.traffic import step_traffic
from tierstore.plan.workload import StepWorkload
from tierstore.prefetch.operations import Kind, Operation, Resource, operations
from tierstore.prefetch.schedule import Pass

Make = Callable[..., Setting]
FREE = Cost(0.0, math.inf)


def _workload(setting: Setting, profile: Profile = ASSUMED) -> StepWorkload:
    taken = capacity(setting)
    return StepWorkload(setting, taken, step_traffic(setting, taken), profile)


def _only(**costs: Cost) -> Profile:
    """A machine on which nothing takes time but ``costs``."""
    names = [field.name for field in fields(Profile) if isinstance(getattr(ASSUMED, field.name), Cost)]
    return replace(ASSUMED, **(dict.fromkeys(names, FREE) | costs))


def test_the_bytes_of_passes_by_hand(setting: Make) -> None:
    """Two ranks: each sends half of a block of 1,248 parameters (624, a multiple of 16), gathers and scatters alike; six
    experts of its own, whose weights are 6 KiB, padded to 8. Of 32 tokens each rank has 16, for 12 experts each, of
    16 x 4 bytes, half of them on the other rank.
    """
    work = _workload(setting(ranks=2))
    forward = work.sizes(Pass(Phase.FORWARD, 1, 0))
    assert (forward.gather, forward.reduce, forward.experts) == (624 * 4, 624 * 4, 6)
    assert (forward.load, forward.to_host) == (8192, 0)
    moved = work.traffic.moved_for[Phase.FORWARD, 0]
    assert (forward.fetch, forward.evict) == (round(moved.read / 6), round(moved.written / 6))
    assert forward.dispatch == forward.combine == 16 * 12 * 16 * 4 // 2
    backward = work.sizes(
        Pass(Phase.BACKWARD, 1, 0)
    )  # and a weight of 4 bytes for each of the 96 rows that travel
    assert backward.dispatch == backward.combine == forward.dispatch + 4 * 96
    head = work.sizes(Pass(Phase.BACKWARD, 3))  # 4,112 parameters, padded to 2 x 2,064
    assert (head.gather, head.experts, head.fetch) == (2064 * 4, 0, 0)


def test_a_step_moves_its_traffic_and_computes_its_flops(setting: Make) -> None:
    work = _workload(setting())
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
    free = _workload(setting(ranks=2), _only())
    slow = _workload(
        setting({f"links.{link}.bandwidth": 1000, f"links.{link}.latency": 0.5}, ranks=2), _only()
    )
    for kind in Kind:
        operation = Operation(kind, 0, 2000, ())
        assert free.seconds(operation) == 0.0
        assert slow.seconds(operation) == (2.5 if kind in kinds else 0.0)


def test_many_experts_are_simulated_in_parts(setting: Make) -> None:
    """40 experts go as 16 operations, and take as long as 40."""
    work = _workload(setting({"model.experts": 40, "model.top_k": 40, "host_budget": "8MiB"}))
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
    planned = setting(ranks=2)
    cost: Cost = getattr(ASSUMED, name)
    before = predict(planned, ASSUMED).step_s
    after = predict(planned, replace(ASSUMED, **{name: Cost(cost.latency_s * 300, cost.per_s / 300)})).step_s
    assert after > before
