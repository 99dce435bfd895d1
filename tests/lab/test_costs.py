"""What misses cost, worked by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cases import requests_of
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore._native import Detail
from tierstore.cache.access import Phase
from tierstore.cache.config import Scope
from tierstore.lab.costs import (
    Machine,
    Objective,
    Overlap,
    cost_by_layer,
    cost_by_step,
    policy_time,
    with_costs,
)
from tierstore.lab.simulate import PolicySpec, ReplaySetting, replay_one
from tierstore.machine_profile import ASSUMED, Cost, Evidence
from tierstore.model.config import ModelConfig
from tierstore.train.config import TrainConfig
from tierstore.train.files import DataConfig

LRU = PolicySpec("lru")


def replayed(**columns):
    """One slot of 100 bytes, two steps of a forward and a backward pass: each misses; the second and the
    fourth write the victim back."""
    requests = requests_of(
        [[0], [1], [0], [1]],
        writes=[[1], [0], [1], [0]],
        steps=[0, 0, 1, 1],
        phases=[Phase.FORWARD, Phase.BACKWARD] * 2,
        frame_bytes=100,
        **columns,
    )
    found = replay_one(requests, ReplaySetting(LRU, 1), 0, Detail.EVENTS)
    assert found.event_read_bytes.tolist() == [100, 100, 100, 100]
    assert found.event_written_bytes.tolist() == [0, 100, 0, 100]
    return requests, found


def test_serial_waits_are_the_fetches():
    machine = Machine(
        read_bytes_per_s=50, write_bytes_per_s=100, compute_s_per_step=6, overlap=Overlap.SERIAL
    )
    assert machine.stalls(*replayed()).tolist() == [2, 3, 2, 3]


def test_with_lookahead_the_pass_before_hides_them():
    # Six seconds a step: two forward, four backward. The first pass has nothing before it.
    machine = Machine(read_bytes_per_s=50, write_bytes_per_s=100, compute_s_per_step=6)
    assert machine.stalls(*replayed()).tolist() == [2, 1, 0, 1]


def test_mixed_traffic_has_a_bandwidth_of_its_own():
    machine = Machine(read_bytes_per_s=50, write_bytes_per_s=100, mixed_bytes_per_s=40)
    assert machine.stalls(*replayed()).tolist() == [2, 5, 2, 5]


def test_drive_writes_and_life():
    requests, found = replayed()
    machine = Machine(
        read_bytes_per_s=50,
        write_bytes_per_s=100,
        compute_s_per_step=6,
        endurance_bytes=200 * 365.25 * 86400,
        drive_bytes=8640,
    )
    cost = with_costs(requests, found, machine)
    # A step: 4 s of stalls in 2 steps, 100 bytes written in 6 + 2 seconds.
    assert cost.stall_s_per_step == 2
    assert cost.drive_writes_per_day == pytest.approx(100 / 8 * 86400 / 8640)
    assert cost.drive_life_years == pytest.approx(200 / (100 / 8))
    faster = Machine(steps_per_s=2, endurance_bytes=400 * 365.25 * 86400, drive_bytes=8640)
    cost = with_costs(requests, found, faster)
    assert cost.drive_writes_per_day == pytest.approx(2000)
    assert cost.drive_life_years == pytest.approx(2)


def test_a_drive_that_is_not_written_lives_for_ever():
    requests = requests_of([[0], [1]])
    found = replay_one(requests, ReplaySetting(LRU, 1), 0, Detail.EVENTS)
    cost = with_costs(requests, found, Machine(compute_s_per_step=1))
    assert (cost.drive_writes_per_day, cost.drive_life_years) == (0, math.inf)


def test_objectives_by_step():
    requests, found = replayed()
    machine = Machine(read_bytes_per_s=50, write_bytes_per_s=100, compute_s_per_step=6)
    assert cost_by_step(requests, found, Objective.MISSES, machine).tolist() == [2, 2]
    assert cost_by_step(requests, found, Objective.BYTES, machine).tolist() == [300, 300]
    assert cost_by_step(requests, found, Objective.STALL, machine).tolist() == [3, 1]


def test_objectives_by_layer():
    # A slot for each layer, two entries in turns in layer 1: it misses four times, and writes one entry twice.
    requests = requests_of(
        [[0], [1], [2], [1], [2]], writes=[[1], [1], [0], [1], [0]], layers=[0, 1, 1, 1, 1], frame_bytes=100
    )
    found = replay_one(requests, ReplaySetting(LRU, 2, Scope.LAYER), 0, Detail.EVENTS)
    machine = Machine(read_bytes_per_s=50, write_bytes_per_s=100)
    assert cost_by_layer(requests, found, Objective.MISSES, machine).tolist() == [1, 4]
    assert cost_by_layer(requests, found, Objective.BYTES, machine).tolist() == [100, 600]
    assert cost_by_layer(requests, found, Objective.STALL, machine).tolist() == [2, 10]


def test_a_policy_s_own_time_is_measured():
    requests = requests_of([[entry] for entry in np.random.default_rng(0).integers(0, 50, 5000)])
    times = policy_time(requests, [ReplaySetting(LRU, 10), ReplaySetting(PolicySpec("lfu-decay"), 10)])
    assert [len(each) for each in times] == [3, 3]
    assert all(0 < seconds < math.inf for each in times for seconds in each)


MEASURED = replace(
    ASSUMED,
    evidence=Evidence.MEASURED,
    machine="a machine",
    disk_read=Cost(0.5, 50),
    disk_write=Cost(1, 100),
    disk_mixed=Cost(0.25, 40),
)


def test_a_profile_has_lines_and_a_transfer_is_an_entry():
    # Each pass reads an entry of 100 bytes: .5 + 2 s. Those that write one back, too, take 200 bytes of mixed traffic.
    machine = Machine(profile=MEASURED, overlap=Overlap.SERIAL)
    assert machine.stalls(*replayed()).tolist() == pytest.approx([2.5, 5.5, 2.5, 5.5])
    # What is given stands in the place of the profile's, and has no latency; then reads and writes take turns.
    machine = Machine(profile=MEASURED, read_bytes_per_s=100, overlap=Overlap.SERIAL)
    assert machine.stalls(*replayed()).tolist() == pytest.approx([1, 1 + 2, 1, 1 + 2])


def test_entries_of_one_size_take_a_latency_each():
    requests = requests_of([[0, 1, 2]], frame_bytes=100)
    found = replay_one(requests, ReplaySetting(LRU, 3), 0, Detail.EVENTS)
    machine = Machine(profile=MEASURED, overlap=Overlap.SERIAL)
    assert machine.stalls(requests, found).tolist() == pytest.approx([3 * MEASURED.disk_read.seconds(100)])


def test_entries_of_unequal_sizes_take_a_latency_each():
    # 1,001 misses at 100 us, one of them of 1 MB at 2 GB/s: 100.1 ms and .5 ms. All of the bytes are its own, nearly.
    requests = requests_of(
        [[entry] for entry in range(1001)], sizes=[1_000_000, *[1] * 1000], steps=[0] * 1001
    )
    found = replay_one(requests, ReplaySetting(LRU, 10**6), 0, Detail.EVENTS)
    stalls = Machine(overlap=Overlap.SERIAL).stalls(requests, found)
    assert stalls[0] == pytest.approx(600e-6)
    assert stalls[1:] == pytest.approx(100e-6, rel=1e-4)
    cost = with_costs(requests, found, Machine(overlap=Overlap.SERIAL))
    assert cost.stall_s_per_step == pytest.approx(100.6e-3, rel=1e-4)


@settings(max_examples=share(60))
@given(
    events=st.lists(
        st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), min_size=1, max_size=20
    ),
    sizes=st.lists(st.integers(1, 9), min_size=7, max_size=7),
    mixed=st.booleans(),
)
def test_the_stall_of_a_pass_is_the_sum_over_what_it_moves(events, sizes, mixed):
    """Weights and moments, say; worked out entry by entry with a cache written here: LRU, sets that are held whole."""
    profile = MEASURED if mixed else replace(MEASURED, disk_mixed=None)
    capacity, writes = 27, [[entry % 2 for entry in event] for event in events]
    requests = requests_of(events, sizes=sizes, writes=writes, frame_bytes=10)
    found = replay_one(requests, ReplaySetting(LRU, capacity), 0, Detail.EVENTS)
    held, dirty, expected = [], set(), []
    for event in events:
        read = [10 * sizes[entry] for entry in event if entry not in held]
        needed, written = sum(sizes[entry] for entry in {*held, *event}), []
        for victim in [entry for entry in held if entry not in event]:
            if needed <= capacity:
                break
            needed -= sizes[victim]
            held.remove(victim)
            written += [10 * sizes[victim]] if victim in dirty else []
            dirty.discard(victim)
        held = [entry for entry in held if entry not in event] + event
        dirty |= {entry for entry in event if entry % 2}
        both = mixed and read and written
        reading, writing = (MEASURED.disk_mixed,) * 2 if both else (MEASURED.disk_read, MEASURED.disk_write)
        expected.append(sum(map(reading.seconds, read)) + sum(map(writing.seconds, written)))
    stalls = Machine(profile=profile, overlap=Overlap.SERIAL).stalls(requests, found)
    assert stalls.tolist() == pytest.approx(expected)


def test_every_number_says_where_it_comes_from():
    assumed = Machine()
    assert assumed.source == "disk assumed, computation assumed"
    assert assumed.assumptions["read bandwidth"] == "100 us an entry and 2 GB/s (assumed)"
    assert assumed.assumptions["endurance"] == "600 TB written (assumed)"
    said = Machine(
        profile=MEASURED,
        mixed_bytes_per_s=1.5e9,
        compute_s_per_step=0.25,
        steps_per_s=2,
        drive_bytes=2e12,
        overlap=Overlap.SERIAL,
    )
    assert said.source == "disk measured profile: a machine and given, computation given"
    assert said.assumptions["read bandwidth"] == "500 ms an entry and 50 B/s (measured profile: a machine)"
    assert said.assumptions["mixed bandwidth"] == "1.5 GB/s (given)"
    assert said.assumptions["computation"] == "250 ms a step (given)"
    assert said.assumptions["drive"] == "2 TB (given)"
    assert said.assumptions["speed"] == "2 steps/s (given)"
    assert "needed" in said.assumptions["overlap"]
    assert Machine(write_bytes_per_s=1).assumptions["mixed bandwidth"] == "read and write in turn"


def test_the_computation_of_a_run_is_what_plan_predicts():
    small = TrainConfig(
        model=ModelConfig(d_model=32, d_ff=64, n_layers=2, n_heads=2, experts=4, top_k=2, seq_len=16),
        data=DataConfig(batch_size=2),
        host_budget=4 << 20,
    )
    fast = replace(MEASURED, dense_flops=Cost(0, 1e9), expert_flops=Cost(0, 1e9), adamw=Cost(0, math.inf))
    slow = replace(fast, dense_flops=Cost(0, 1e6), expert_flops=Cost(0, 1e6))
    machines = [Machine(profile=profile, run=small) for profile in (fast, slow)]
    assert machines[1].compute_s == pytest.approx(1000 * machines[0].compute_s, rel=0.01)
    assert machines[0].source.endswith("computation predicted by plan, measured profile: a machine")
    assert Machine(profile=fast, run=small, compute_s_per_step=3).compute_s == 3
