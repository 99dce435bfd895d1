"""tierstore.stats: the ledger adds up, counters count, percentiles agree with numpy."""

from typing import Any

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.stats import Cause, StallKey, StallLedger, Tier, delta, in_parts, percentile, spread


class FakeClock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


READ = StallKey(3, Tier.NVME, Cause.DEMAND_READ)
COMMIT = StallKey(None, Tier.NVME, Cause.COMMIT)


def stall(ledger: StallLedger, key: StallKey) -> Any:
    return ledger.stall(layer=key.layer, tier=key.tier, cause=key.cause)


def test_by_hand() -> None:
    clock = FakeClock()
    heard: list[tuple[StallKey, int, int]] = []
    ledger = StallLedger(clock=clock, listener=lambda *interval: heard.append(interval))
    with stall(ledger, READ):
        clock.now += 5
    clock.now += 100  # nobody waits
    with stall(ledger, READ):
        clock.now += 7
    with stall(ledger, COMMIT):
        clock.now += 20
    assert [(row.key, row.stall_ns, row.intervals) for row in ledger.rows()] == [
        (COMMIT, 20, 1),
        (READ, 12, 2),
    ]
    assert ledger.total_ns == 32
    assert ledger.total_s == pytest.approx(32e-9)
    assert ledger.totals(lambda key: key.tier) == {Tier.NVME: 32}
    assert ledger.totals(lambda key: key.cause) == {Cause.DEMAND_READ: 12, Cause.COMMIT: 20}
    assert heard == [(READ, 1000, 1005), (READ, 1105, 1112), (COMMIT, 1112, 1132)]
    assert ledger.rows()[1].as_dict() == {
        "layer": 3,
        "dimension": "vertical",
        "tier": "nvme",
        "cause": "demand read",
        "stall_s": 12e-9,
        "intervals": 2,
    }


def test_an_inner_stall_takes_its_time_out_of_the_outer() -> None:
    clock = FakeClock()
    ledger = StallLedger(clock=clock)
    with stall(ledger, COMMIT):
        clock.now += 1
        with stall(ledger, READ):
            clock.now += 10
        clock.now += 100
    assert ledger.totals(lambda key: key) == {COMMIT: 101, READ: 10}
    assert ledger.total_ns == 111


def test_a_stall_that_raises_is_charged() -> None:
    clock = FakeClock()
    ledger = StallLedger(clock=clock)

    def fail() -> None:
        with stall(ledger, READ):
            clock.now += 4
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert ledger.total_ns == 4


def test_no_interval_is_negative() -> None:
    with pytest.raises(ValueError, match="-1 ns"):
        StallLedger().charge(READ, -1)


nested = st.recursive(
    st.integers(0, 50), lambda inner: st.tuples(st.sampled_from([READ, COMMIT]), st.lists(inner, max_size=4))
)


@settings(max_examples=share(60))
@given(tree=st.tuples(st.just(READ), st.lists(nested, max_size=5)))
def test_charges_add_up_to_the_time_stalled(tree: tuple[StallKey, list[Any]]) -> None:
    """Oracle: each leaf is time that passes in the innermost stall around it."""
    clock = FakeClock()
    ledger = StallLedger(clock=clock)
    expected: dict[object, int] = {}

    def run(key: StallKey, body: list[Any]) -> None:
        expected.setdefault(key, 0)
        with stall(ledger, key):
            for item in body:
                if isinstance(item, int):
                    clock.now += item
                    expected[key] += item
                else:
                    run(*item)

    run(*tree)
    assert ledger.totals(lambda key: key) == expected
    assert ledger.total_ns == clock.now - 1000


def test_delta() -> None:
    assert delta({"hits": 1, "misses": 0}, {"hits": 3, "misses": 5}) == {"hits": 2, "misses": 5}
    assert delta({}, {"late": 2}) == {"late": 2}


@settings(max_examples=share(60))
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), percent=st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)
    assert min(values) <= found <= max(values)


def test_spread_by_hand() -> None:
    found = spread([5, 1, 3])
    assert (found.count, found.median, found.least, found.greatest) == (3, 3, 1, 5)
    assert (found.p10, found.p90) == (pytest.approx(1.4), pytest.approx(4.6))
    with pytest.raises(ValueError, match="0 values"):
        spread([])


def test_part_of_a_stall_can_be_somebody_elses() -> None:
    """30 ns of waiting for a commit, of which 20 were the write budget's; an inner stall has its own 5."""
    clock = FakeClock()
    blocked = 0
    ledger = StallLedger(clock=clock)
    ledger.divert(Cause.WRITE_BUDGET, lambda: blocked)
    with stall(ledger, READ):
        clock.now += 3  # nothing of it the budget's
    with stall(ledger, COMMIT):
        clock.now, blocked = clock.now + 20, blocked + 15
        with stall(ledger, READ):
            clock.now, blocked = clock.now + 6, blocked + 5
        clock.now, blocked = clock.now + 10, blocked + 5
    budget = {
        key.layer: ns
        for key, ns in ((row.key, row.stall_ns) for row in ledger.rows())
        if key.cause is Cause.WRITE_BUDGET
    }
    assert budget == {None: 20, 3: 5}
    assert ledger.totals(lambda key: key.cause) == {
        Cause.WRITE_BUDGET: 25,
        Cause.COMMIT: 10,
        Cause.DEMAND_READ: 4,
    }
    assert ledger.total_ns == 39


def test_a_watcher_hears_of_the_outermost_stalls() -> None:
    clock, heard = FakeClock(), []
    ledger = StallLedger(clock=clock)
    ledger.watch(lambda: heard.append("begun"), lambda: heard.append("ended"))
    with stall(ledger, COMMIT):
        with stall(ledger, READ):
            assert heard == ["begun"]
        assert heard == ["begun"]
    assert heard == ["begun", "ended"]
    with pytest.raises(ZeroDivisionError), stall(ledger, READ):
        raise ZeroDivisionError
    assert heard == ["begun", "ended", "begun", "ended"]


def test_parts_add_up_to_one_pass() -> None:
    """Stores of 10, 30 and 20 bytes: until one begins, it counts as much as the one that is read."""
    seen: list[tuple[int, int]] = []
    for size, part in zip((10, 30, 20), in_parts(lambda *at: seen.append(at), 3), strict=True):
        part(0, size)
        part(size, size)
    assert seen == [(0, 30), (10, 30), (10, 70), (40, 70), (40, 60), (60, 60)]
    assert list(in_parts(lambda *at: seen.append(at), 0)) == []
