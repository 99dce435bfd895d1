"""What misses cost, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import requests_of

from tierstore.cache.access import Phase
from tierstore.errors import ConfigError
from tierstore.lab.costs import (
    Machine,
    Objective,
    Overlap,
    cost_by_layer,
    cost_by_step,
    policy_time,
    with_costs,
)
from tierstore.lab.simulate import PolicySpec, Scope, Setting, outcome, replay_all

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
    (found,) = replay_all(requests, [Setting(LRU, 1)])
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
    cost = with_costs(requests, found, outcome(requests, found), machine)
    # A step: 4 s of stalls in 2 steps, 100 bytes written in 6 + 2 seconds.
    assert cost.stall_s_per_step == 2
    assert cost.drive_writes_per_day == pytest.approx(100 / 8 * 86400 / 8640)
    assert cost.drive_life_years == pytest.approx(200 / (100 / 8))
    faster = Machine(steps_per_s=2, endurance_bytes=None, drive_bytes=8640)
    cost = with_costs(requests, found, outcome(requests, found), faster)
    assert cost.drive_writes_per_day == pytest.approx(2000)
    assert cost.drive_life_years is None


def test_a_drive_that_is_not_written_lives_for_ever():
    requests = requests_of([[0], [1]])
    (found,) = replay_all(requests, [Setting(LRU, 1)])
    cost = with_costs(requests, found, outcome(requests, found), Machine(compute_s_per_step=1))
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
        [[0], [1], [2], [1], [2]],
        writes=[[1], [1], [0], [1], [0]],
        layers=[0, 1, 1, 1, 1],
        frame_bytes=100,
    )
    (found,) = replay_all(requests, [Setting(LRU, 2, Scope.LAYER)])
    machine = Machine(read_bytes_per_s=50, write_bytes_per_s=100)
    assert cost_by_layer(requests, found, Objective.MISSES, machine).tolist() == [1, 4]
    assert cost_by_layer(requests, found, Objective.BYTES, machine).tolist() == [100, 600]
    assert cost_by_layer(requests, found, Objective.STALL, machine).tolist() == [2, 10]


def test_a_policy_s_own_time_is_measured():
    requests = requests_of([[entry] for entry in np.random.default_rng(0).integers(0, 50, 5000)])
    times = policy_time(requests, [Setting(LRU, 10), Setting(PolicySpec("lfu-decay"), 10)])
    assert [len(each) for each in times] == [3, 3]
    assert all(0 < seconds < 1e-3 for each in times for seconds in each)


def test_assumptions_are_said():
    said = Machine(mixed_bytes_per_s=1.5e9, steps_per_s=2, overlap=Overlap.SERIAL).assumptions
    assert said["mixed bandwidth"] == "1.5 GB/s"
    assert (said["endurance"], said["drive"]) == ("600 TB written", "1 TB")
    assert said["speed"] == "2 steps/s"
    assert "needed" in said["overlap"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"read_bytes_per_s": 0},
        {"write_bytes_per_s": -1},
        {"mixed_bytes_per_s": math.nan},
        {"endurance_bytes": 0},
        {"drive_bytes": 0},
        {"steps_per_s": 0},
        {"compute_s_per_step": -1},
    ],
)
def test_machines_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected"):
        Machine(**wrong)
