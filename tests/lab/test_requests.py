"""Requests of traces and of columns, and pinned records."""

import json

import numpy as np
import pytest
from cases import access, requests_of, simulate, write_events
from command_line import done, invoke
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.lab.generators import RoutingWorkload
from tierstore.lab.importing import write_trace
from tierstore.lab.miss_curves import curves, has_one_pass
from tierstore.lab.requests import Requests, load_requests, parse_pins, pin
from tierstore.lab.simulate import Contract, known_policies
from tierstore.trace.format import TraceKind, TraceRecord

W, M, G = 1, 2, 4  # groups needed


def test_groups_become_entries(tmp_path):
    path = write_events(
        tmp_path / "trace",
        [
            access(3, [0, 2], [W, W | M]),
            (TraceKind.PREFETCH, 3, 1, 0, [1], [W]),
            access(3, [2], [W | M | M << 3], phase=2),
            (TraceKind.END_STEP, 3, 0, 0, [], []),
            access(7, [0], [W]),
        ],
    )
    found = load_requests(path)
    assert found.name == "trace"
    assert len(found.sha256) == 64
    # Entries asked for, by key: weights of 0, weights of 2, moments of 2.
    assert found.table.keys.tolist() == [0, 6, 7]
    assert found.offsets.tolist() == [0, 3, 5, 6]
    assert found.entries.tolist() == [0, 1, 2, 1, 2, 0]
    assert found.writes.tolist() == [0, 0, 0, 0, 1, 0]
    assert found.phases.tolist() == [1, 2, 1]
    assert found.steps.tolist() == [0, 0, 1]
    assert found.table.frames.tolist() == [1, 1, 2]
    assert (found.table.records.tolist(), found.table.groups.tolist()) == ([0, 2, 2], [0, 0, 1])
    assert found.table.record_frames.tolist() == [4, 4, 4]  # gradients, too
    assert found.table.largest_record_frames == 4
    assert found.table.nbytes.tolist() == [4096, 4096, 8000]
    assert (found.table.total_frames, found.table.total_bytes, found.table.frame_bytes) == (4, 16192, 4096)
    assert found.largest_event_frames == 4
    assert found.left_out == {"prefetch": 1}
    assert (found.info.records, found.info.requests, found.info.events, found.info.steps) == (2, 6, 3, 2)


def test_what_a_run_discards_is_left_out(tmp_path):
    flags = W | G | G << 3 | G << 6
    found = load_requests(
        write_events(tmp_path / "trace", [access(0, [0, 1], [W, W]), access(0, [0, 1], [flags] * 2)])
    )
    assert found.table.keys.tolist() == [0, 3]
    assert found.offsets.tolist() == [0, 2, 4]
    assert found.left_out == {"discarded requests": 2}


def test_the_first_request_of_what_has_no_copy_makes_it(tmp_path):
    record = TraceRecord(0, (1, 2, 1), (4096, 8192, 4096), 1)
    events = [access(0, [1], [W | M]), access(1, [0, 1], [W, W | M]), access(2, [0], [W | M])]
    found = load_requests(write_events(tmp_path / "trace", events, record=record))
    assert found.table.keys[found.creations()[1]].tolist() == [4, 1]
    assert found.creations()[0].tolist() == [0, 2]
    assert found.creations(since=1)[0].tolist() == [2]
    later = found.between(1, 3)
    assert later.table.keys[later.creations()[1]].tolist() == [1]
    assert later.creations()[0].tolist() == [1]


def test_many_chunks_are_one(tmp_path):
    rng = np.random.default_rng(1)
    events = [access(i, np.flatnonzero(rng.random(300) < 0.5), None) for i in range(1000)]
    events = [(k, s, p, layer, asked, np.full(len(asked), 1)) for k, s, p, layer, asked, _ in events]
    found = load_requests(write_events(tmp_path / "trace", events, records=300))
    assert found.entries.tolist() == [entry for event in events for entry in event[4].tolist()]
    assert np.diff(found.offsets).tolist() == [len(event[4]) for event in events]


@pytest.mark.parametrize(
    ("capacity", "frames"),
    [(3, 3), (0.5, 5), ("0.5", 5), ("50%", 5), ("8KiB", 2), ("9000", 2), ("7f", 7), (1.0, 10)],
)
def test_capacities(capacity, frames):
    requests = Requests.of_columns([0, 2], [0, 1], sizes=[4, 6], frame_bytes=4096)
    assert requests.table.frames_of(capacity) == frames


def test_a_span_of_steps():
    requests = Requests.of_columns([0, 1, 3, 4, 6], [0, 1, 2, 0, 3, 1], steps=[0, 0, 1, 2])
    part = requests.between(1, 3)
    assert (part.offsets.tolist(), part.entries.tolist()) == ([0, 1, 3], [0, 3, 1])
    assert part.steps.tolist() == [0, 1]
    assert part.table.total_frames == requests.table.total_frames


def test_a_cycle_with_one_record_pinned():
    # Two frames, three entries in turn: LRU misses each time. With 0 pinned, 1 and 2 take turns in the other frame.
    requests = requests_of([[0], [1], [2]] * 3)
    assert [one.misses for one in simulate(requests, ["lru"], ["2f"])] == [9]
    pinned = pin(requests, [(0, 0)])
    (found,) = simulate(pinned, ["lru"], ["2f"])
    assert found.misses == 7
    assert found.contract == "event-atomic, 1 record of 1 frame pinned"
    assert requests.table.pins == ""


@settings(max_examples=share(40))
@given(
    keys=st.lists(st.integers(0, 7), min_size=8, max_size=80),
    chosen=st.sets(st.integers(0, 7), max_size=3),
    room=st.integers(1, 4),
)
def test_against_a_cache_of_the_rest(keys, chosen, room):
    # With everything that is pinned resident from the start, LRU on the rest has the capacity less the pins.
    keys = [*range(8), *keys]
    chosen = sorted(chosen)
    requests = pin(requests_of([[key] for key in [*chosen, *keys]]), [(0, key) for key in chosen])
    (found,) = simulate(requests, ["lru"], [f"{len(chosen) + room}f"], contract=Contract.SEQUENTIAL)
    rest, order = 0, []
    for key in (key for key in keys if key not in chosen):
        if key in order:
            order.remove(key)
        else:
            rest += 1
            order = order[-(room - 1) :] if room > 1 else []
        order.append(key)
    assert found.misses == rest + len(chosen)


@pytest.mark.parametrize("policy", known_policies())
def test_every_policy_and_bound_passes_over_what_is_pinned(policy):
    rng = np.random.default_rng(0)
    events = [sorted(rng.choice(12, 3, replace=False).tolist()) for _ in range(200)]
    layers = [0] * 200
    requests = pin(requests_of(events, layers=layers), [(0, 3), (0, 5)])
    (found,) = simulate(requests, [policy], ["7f"])
    free = simulate(requests_of([[e for e in ev if e not in (3, 5)] for ev in events]), ["unbounded"], ["7f"])
    assert found.misses >= 2 + free[0].misses


def test_pinned_requests_have_no_one_pass():
    requests = requests_of([[0], [1], [2]] * 8)
    assert has_one_pass(requests, 2)
    pinned = pin(pin(requests, [(0, 1)]), [(0, 2)])
    assert not has_one_pass(pinned, 2)
    assert pinned.table.pins == "2 records of 2 frames pinned"
    (curve,) = curves(pinned, ["lru"], ["3f"])
    assert curve.points[0].misses == 3
    assert pinned.between(3, 6).table.pins == pinned.table.pins


def test_records_are_named_by_layer_and_place(tmp_path):
    workload = RoutingWorkload(layers=3, experts=8, k=2, tokens_per_step=8, steps=20)
    write_trace(tmp_path / "run.trace", workload.table(), workload.chunks(), origin="a test")
    requests = load_requests(tmp_path / "run.trace")
    pinned = pin(requests, [(1, 5), (2, 0)])
    assert sorted(set(pinned.table.records[pinned.table.pinned > 0].tolist())) == [8 + 5, 16]


def test_how_pins_are_written():
    assert parse_pins(["3:17,3:18", " 0:0 ", "3:17"]) == [(3, 17), (3, 18), (0, 0)]


def test_the_commands_name_what_is_pinned(tmp_path):
    workload = RoutingWorkload(layers=2, experts=6, k=2, tokens_per_step=4, steps=12)
    trace = tmp_path / "run.trace"
    write_trace(trace, workload.table(), workload.chunks(), origin="a test")
    for command in (("simulate", "--capacity", "0.5"), ("curve", "--points", "2")):
        ran = done("cache", command[0], trace, *command[1:], "--policy=lru", "--pin=0:1,1:2", "--json")
        assert "event-atomic, 2 records of " in ran.stderr
        assert json.loads(ran.stdout)["contract"].endswith("pinned")
    for pins, said in (
        ("9:9", "run.trace does not request record 9:9"),
        ("all", "expected LAYER:EXPERT,..., got 'all'"),
    ):
        ran = invoke("cache", "simulate", trace, "--pin", pins)
        assert ran.exit_code == 2
        assert f"--pin: {said}" in ran.stderr
