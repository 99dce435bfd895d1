"""Pins: what is pinned comes once and stays, and everything else shares what is left."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cases import requests_of
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.cli.main import cli
from tierstore.errors import BudgetError, ConfigError
from tierstore.lab.generators import RoutingWorkload
from tierstore.lab.importing import write_trace
from tierstore.lab.miss_curves import curves, has_one_pass
from tierstore.lab.requests import load_requests, parse_pins, pin
from tierstore.lab.simulate import Contract, known_policies, simulate
from tierstore.lab.tuning import tune


def test_a_cycle_with_one_record_pinned():
    # Two frames, three entries in turn: LRU misses each time. With 0 pinned, 1 and 2 take turns in the other frame.
    requests = requests_of([[0], [1], [2]] * 3)
    assert [one.misses for one in simulate(requests, ["lru"], ["2f"])] == [9]
    pinned = pin(requests, [(0, 0)])
    (found,) = simulate(pinned, ["lru"], ["2f"])
    assert found.misses == 7
    assert found.contract == "event-atomic, 1 record of 1 frame pinned"
    assert requests.table.pins == ""


@settings(deadline=None, max_examples=40)
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


def test_pinned_requests_have_no_one_pass_and_no_tuning():
    requests = requests_of([[0], [1], [2]] * 8)
    assert has_one_pass(requests, 2)
    pinned = pin(pin(requests, [(0, 1)]), [(0, 2)])
    assert not has_one_pass(pinned, 2)
    assert pinned.table.pins == "2 records of 2 frames pinned"
    (curve,) = curves(pinned, ["lru"], ["3f"])
    assert curve.points[0].misses == 3
    with pytest.raises(ConfigError, match="2 records of 2 frames pinned: a live cache pins nothing"):
        tune(pinned, 0.5)
    with pytest.raises(BudgetError, match="too small"):
        simulate(pinned, ["lru"], ["1f"])
    assert pinned.between(3, 6).table.pins == pinned.table.pins


def test_records_are_named_by_layer_and_place(tmp_path):
    workload = RoutingWorkload(layers=3, experts=8, k=2, tokens_per_step=8, steps=20)
    write_trace(tmp_path / "run.trace", workload.table(), workload.chunks(), origin="a test")
    requests = load_requests(tmp_path / "run.trace")
    pinned = pin(requests, [(1, 5), (2, 0)])
    assert sorted(set(pinned.table.records[pinned.table.pinned > 0].tolist())) == [8 + 5, 16]
    with pytest.raises(ConfigError, match=r"pins: run.trace asks for no record 3:0"):
        pin(requests, [(3, 0)])


def test_how_pins_are_written():
    assert parse_pins(["3:17,3:18", " 0:0 ", "3:17"]) == [(3, 17), (3, 18), (0, 0)]
    for wrong in ("3", "3:", ":1", "a:1", "1:2:3", "-1:0", "1:2,"):
        with pytest.raises(ConfigError, match="--pin: expected LAYER:EXPERT"):
            parse_pins([wrong], name="--pin")


def test_the_commands_name_what_is_pinned(tmp_path):
    workload = RoutingWorkload(layers=2, experts=6, k=2, tokens_per_step=4, steps=12)
    trace = tmp_path / "run.trace"
    write_trace(trace, workload.table(), workload.chunks(), origin="a test")
    for command in (("simulate", "--capacity", "0.5"), ("curve", "--points", "2")):
        arguments = ["cache", command[0], str(trace), *command[1:], "--policy", "lru", "--pin", "0:1,1:2"]
        ran = CliRunner().invoke(cli, [*arguments, "--json"])
        assert ran.exit_code == 0, ran.stderr
        assert "event-atomic, 2 records of " in ran.stderr
        assert json.loads(ran.stdout)["contract"].endswith("pinned")
    ran = CliRunner().invoke(cli, ["cache", "simulate", str(trace), "--pin", "9:9"])
    assert ran.exit_code == 2
    assert "--pin: run.trace asks for no record 9:9" in ran.stderr
    ran = CliRunner().invoke(cli, ["cache", "simulate", str(trace), "--pin", "all"])
    assert ran.exit_code == 2
    assert "--pin: expected LAYER:EXPERT,..., got 'all'" in ran.stderr
