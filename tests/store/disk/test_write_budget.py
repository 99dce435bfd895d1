"""The write budget: a token bucket that makes writes wait, and changes nothing else."""

import struct
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_model, small_store
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _native
from tierstore._native import Activity, Link, Priority
from tierstore.errors import ConfigError
from tierstore.store import ParameterStore, StoreConfig, WearConfig
from tierstore.store.disk import write_budget
from tierstore.store.disk.write_budget import WriteBudget

S = 1_000_000_000
DAY = 86_400


# The bucket -------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """100 bytes/s, 1000 bytes at once: 10 s of credit."""
    link = Link(100.0, 0.0, 1000.0)
    now = 50 * S
    link.set_level(1000, now)
    assert link.level(now) == pytest.approx(1000)
    assert link.reserve(600, now) == now  # there is credit
    assert link.level(now) == pytest.approx(400)
    assert link.reserve(600, now) == now + 2 * S  # 200 short
    assert link.level(now) == pytest.approx(-200)
    assert link.level(now + 7 * S) == pytest.approx(500)
    assert link.level(now + 99 * S) == pytest.approx(1000), "full"
    link.set_level(10**9, now)
    assert link.level(now) == pytest.approx(1000), "never more than full"
    early = Link(100.0, 0.0, 1000.0)
    early.set_level(1000, 0)
    assert early.reserve(1000, 0) == 0, "credit may be older than the clock"


@settings(max_examples=share(60))
@given(
    st.integers(1, 10**6),
    st.integers(0, 10**7),
    st.lists(st.tuples(st.integers(0, 10 * S), st.integers(0, 10**6)), max_size=20),
)
def test_the_bucket_in_exact_arithmetic(rate: int, burst: int, asked: list[tuple[int, int]]) -> None:
    """Oracle: a level in rationals, which rises with time up to the burst, and falls by what is taken."""
    link = Link(float(rate), 0.0, float(burst))
    now, level = 100 * S, Fraction(burst)
    link.set_level(burst, now)
    for pause, nbytes in asked:
        now += pause
        level = min(level + Fraction(pause * rate, S), Fraction(burst)) - nbytes
        wait = max(-level / rate, 0) * S
        assert link.reserve(nbytes, now) - now == pytest.approx(float(wait), rel=1e-9, abs=1000)


def test_nobody_waits_for_it_so_half_is_left_to_others(tmp_path: Path) -> None:
    """Held until half is there again; whoever waits gets it at once."""
    with _native.Engine(backend=_native.IoBackend.THREADS) as engine:
        link = Link(1000.0, 0.0, 1e6)
        link.set_level(499_000)
        patient = engine.hold(link, 1000, Activity.WRITE, priority=Priority.WRITE_BACK)
        time.sleep(0.01)
        assert not engine.done(patient)
        engine.wait(patient, timeout_s=5)
        assert link.blocked_ns == 0, "there was credit: the wait was not the bucket's"
        link.set_level(900_000)
        engine.wait(engine.hold(link, 1000, Activity.WRITE, priority=Priority.WRITE_BACK), timeout_s=5)


def test_what_is_waited_for_with_no_credit_is_counted() -> None:
    with _native.Engine(backend=_native.IoBackend.THREADS) as engine:
        link = Link(1e6, 0.0, 1000.0)
        link.set_level(0)
        begun = time.monotonic_ns()
        held = engine.hold(link, 50_000, Activity.WRITE, priority=Priority.WRITE_BACK)
        engine.wait(held)
        taken = time.monotonic_ns() - begun
        assert taken >= 50_000_000
        assert 40_000_000 <= link.blocked_ns <= taken


def test_a_burst_needs_a_rate() -> None:
    for bandwidth, burst in ((float("inf"), 1.0), (1.0, -1.0), (1.0, float("inf"))):
        with pytest.raises(ValueError, match="burst"):
            Link(bandwidth, 0.0, burst)


# Across runs ------------------------------------------------------------------------------------------------


@pytest.fixture
def budget() -> Callable[[float], WriteBudget]:
    """A budget of 24,000 bytes a day, so 1000 at once, at a wall clock."""
    engine = _native.Engine(backend=_native.IoBackend.THREADS)

    def make(clock: float) -> WriteBudget:
        return WriteBudget(engine, 24_000, clock=lambda: clock)

    return make


@pytest.mark.parametrize(
    ("later", "level"),
    [
        (0, 100),
        (36 * 60, 700),  # 1000 an hour
        (DAY * 365 * 30, 1000),  # a clock that jumped years ahead fills it once
        (-DAY * 365 * 30, 100),  # one that jumped back refills nothing
        (float("nan"), 100),
    ],
)
def test_the_level_survives_and_no_clock_breaks_it(
    budget: Callable[[float], WriteBudget], later: float, level: float
) -> None:
    first = budget(1e9)
    first._link.set_level(100)
    raw = first.pack()
    second = budget(1e9 + later)
    second.unpack(raw)
    assert second.level == pytest.approx(level, abs=1)


@pytest.mark.parametrize(
    "raw", [b"", b"rubbish", struct.pack("<dd", float("nan"), 0.0), struct.pack("<dd", -1e300, 1e300)]
)
def test_what_is_no_level_is_an_empty_bucket(budget: Callable[[float], WriteBudget], raw: bytes) -> None:
    found = budget(1e9)
    found.unpack(raw)
    assert -1001 <= found.level <= 1


def test_a_fresh_one_is_full(budget: Callable[[float], WriteBudget]) -> None:
    assert budget(0).level == pytest.approx(1000, abs=1)


# The store --------------------------------------------------------------------------------------------------

NUMEL = 3000


def tight(monkeypatch: pytest.MonkeyPatch) -> WearConfig:
    """2 MB/s and 20 kB at once: less than one slot."""
    monkeypatch.setattr(write_budget, "_BURST_S", 0.01)
    return WearConfig(daily_write_budget=2_000_000 * DAY)


def test_writes_wait_and_nothing_else_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_store(tmp_path / "store").close()
    model = small_model(NUMEL)
    rng = np.random.default_rng(2)
    config = StoreConfig(host_budget=120_000, wear=tight(monkeypatch))  # little more than one record
    with ParameterStore.open(tmp_path / "store", config) as store:
        assert any(line.startswith("write budget: ") for line in store.status().effective)
        begun = time.monotonic()
        for _ in range(6):
            gradients = {f"e{i}": rng.standard_normal(NUMEL).astype(np.float32) for i in range(4)}
            store.update(gradients, lr=1e-2)
            model.update(gradients, 1e-2)
        store.commit()
        taken = time.monotonic() - begun
        budget = store.core.extents.budget
        written = store.core.engine.stats()["written_bytes"]
        assert written > 400_000
        assert taken >= (written - 2 * 20_000) / 2e6, "never faster than the budget"
        assert budget.blocked_ns > 0
        for key, (weight, *_) in model.records.items():
            with store.fetch([key]) as lease:
                assert np.array_equal(lease[key].view("weight"), weight)
        assert store.verify().failures == []


def test_the_level_is_committed_with_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_store(tmp_path / "store").close()
    slow = StoreConfig(host_budget=1 << 20, wear=WearConfig(daily_write_budget=24_000_000))
    with ParameterStore.open(tmp_path / "store", slow) as store:
        store.core.extents.budget._link.set_level(5000)
        store.commit({"other": b"x"})
    with ParameterStore.open(tmp_path / "store", slow) as store:
        assert store.core.extents.budget.level < 500_000, "not full, as a new one would be"
        with pytest.raises(ValueError, match="is reserved"):
            store.commit({"write-budget": b""})
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        assert store.core.extents.budget is None
        assert not any("write budget" in line for line in store.status().effective)


def test_a_wait_of_days_ends_with_the_store(tmp_path: Path) -> None:
    """The commit would wait for a day: closing takes back what has not started."""
    small_store(tmp_path / "store").close()
    config = StoreConfig(host_budget=1 << 20, wear=WearConfig(daily_write_budget=24_000))
    begun = time.monotonic()
    with ParameterStore.open(tmp_path / "store", config) as store:
        store.update({"e0": np.ones(NUMEL, np.float32)}, lr=1e-2)
        store.core.committer.begin()
        assert any(not store.core.engine.done(ticket) for ticket in store.core.committer.writes)
    assert time.monotonic() - begun < 60
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        assert store.verify().failures == []


def test_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="daily_write_budget"):
        WearConfig(daily_write_budget=-1)
    with pytest.raises(ConfigError, match="endurance"):
        WearConfig(endurance=-1)
