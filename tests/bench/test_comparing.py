"""The comparison: verdicts by hand, Student's quantile against scipy, and how often noise is taken for a change."""

from dataclasses import replace

import numpy as np
import pytest
from documents import MACHINE, document, small
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t

from tierstore.bench import comparing
from tierstore.bench.comparing import ChangeKind, compare, table
from tierstore.bench.documents import Better, Measurement, counted, derived, measured
from tierstore.errors import DataError


def one(old: Measurement, new: Measurement) -> comparing.Compared:
    (row,) = compare(document([old]), document([new])).rows
    return row


def step(*samples: float, better: Better = Better.LOWER, target: float | None = None) -> Measurement:
    return measured("step", samples, "s", better, target=target)


OLD = (1.00, 1.01, 0.99, 1.02, 0.98, 1.0)


def test_verdicts_by_hand() -> None:
    slower = one(step(*OLD), step(*(2 * value for value in OLD)))
    assert (slower.ratio, slower.change, slower.word) == (2.0, ChangeKind.WORSE, "slower")
    assert 1.9 < slower.low < 2 < slower.high < 2.1
    assert one(step(*OLD), step(*(value / 2 for value in OLD))).word == "faster"
    assert one(step(*OLD), step(*reversed(OLD))).change is ChangeKind.WITHIN
    wide = one(step(1, 2, 3, 4), step(2, 3, 4, 5))
    assert wide.change is ChangeKind.WITHIN
    assert one(step(*OLD, better=Better.HIGHER), step(*(2 * v for v in OLD), better=Better.HIGHER)).word == (
        "faster"
    )
    ratio = [derived("r", values, "ratio", Better.HIGHER) for values in (OLD, [value / 2 for value in OLD])]
    assert one(*ratio).word == "worse"


def test_what_has_no_noise_to_speak_of() -> None:
    assert one(step(1.0), step(9.0)).change is ChangeKind.UNKNOWN
    assert one(step(*OLD), step(9.0)).change is ChangeKind.UNKNOWN
    assert one(step(1.0), step(1.0)).change is ChangeKind.SAME
    # Three against three: even ranges apart by a tenth are no evidence.
    assert one(step(1.0, 1.05, 1.1), step(1.2, 1.25, 1.3)).change is ChangeKind.WITHIN
    # Counts are exact.
    assert one(counted("sent", 10, "bytes"), counted("sent", 11, "bytes")).change is ChangeKind.CHANGED
    sent = one(counted("sent", 0, "bytes", Better.LOWER), counted("sent", 11, "bytes", Better.LOWER))
    assert (sent.ratio, sent.change) == (None, ChangeKind.WORSE)
    assert one(step(-1.0, -1.0, 2.0, 0.0), step(1, 2, 3, 4)).change is ChangeKind.UNKNOWN


def test_targets_that_turn() -> None:
    slower = one(step(*OLD, target=1.5), step(*(2 * value for value in OLD), target=1.5))
    assert slower.word == "slower, target missed now"
    faster = one(step(*(2 * value for value in OLD), target=1.5), step(*OLD, target=1.5))
    assert faster.word == "faster, target met now"


@pytest.mark.parametrize("freedom", range(1, 41))
def test_students_quantile_is_scipys(freedom: int) -> None:
    assert comparing.student(freedom) == pytest.approx(t.ppf(0.975, freedom), rel=2e-3)


@pytest.mark.parametrize("count", [3, 4, 6, 10])
@pytest.mark.parametrize("summary", [False, True])
def test_noise_is_seldom_taken_for_a_change(count: int, summary: bool) -> None:
    rng = np.random.default_rng(count)
    called = 0
    for _ in range(60):
        pair = [step(*np.exp(0.05 * rng.standard_normal(count))) for _ in range(2)]
        if summary:
            pair = [replace(each, samples=()) for each in pair]
        called += one(*pair).change is not ChangeKind.WITHIN
    assert called <= 8  # 13%: 5% was promised, and few samples keep no promise exactly


@given(st.floats(0.01, 100), st.lists(st.floats(0.5, 2), min_size=2, max_size=8))
@settings(max_examples=share(30))
def test_the_unit_does_not_matter(scale: float, samples: list[float]) -> None:
    """And old and new exchanged give the inverse ratio."""
    old, new = step(*samples), step(*(value * value for value in samples))
    plain, scaled = (
        one(old, new),
        one(step(*(scale * v for v in old.samples)), step(*(scale * v for v in new.samples))),
    )
    assert plain.ratio == pytest.approx(scaled.ratio)
    back = one(new, old)
    assert back.ratio == pytest.approx(1 / plain.ratio)


def test_runs_that_differ_are_said_to() -> None:
    old = document(small())
    new = document(
        [*small()[1:], counted("new", 1, "bytes")],
        machine=replace(MACHINE, cores=4),
        options={"rounds": 9, "store": "there"},
        tool_version="10",
    )
    found = compare(old, new)
    assert found.warnings == (
        "another machine: cores was 2, is 4",
        "other options: rounds was 5, is 9",
        "another version: was 9.9, is 10",
    )
    assert found.only_old == ("commit",)
    assert found.only_new == ("new",)
    assert compare(old, old).warnings == ()
    assert {row.change for row in compare(old, old).rows} <= {ChangeKind.SAME, ChangeKind.WITHIN}


def test_what_cannot_be_compared() -> None:
    with pytest.raises(DataError, match="expected a document of bench commit to compare with, got one of io"):
        compare(document(small(), bench="io"), document(small()))
    with pytest.raises(DataError, match="no measurement in common"):
        compare(document(small()[:1]), document(small()[1:]))


def test_the_worst_comes_first() -> None:
    names = "abc"
    old = document([measured(name, OLD, "s", Better.LOWER) for name in names])
    new = document(
        [
            measured(name, [factor * value for value in OLD], "s", Better.LOWER)
            for name, factor in zip(names, (1.0, 0.5, 2.0), strict=True)
        ]
    )
    columns, rows = table(compare(old, new))
    assert [row[:2] for row in rows] == [("c", "slower"), ("b", "faster"), ("a", "within noise")]
    assert all(len(row) == len(columns) for row in rows)
    assert rows[0][2:5] == ("1 s", "2 s", "2.000")
