"""Failures are kept so that a ticket can be waited for late, in memory that does not grow with them."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native as native


@pytest.fixture
def engine() -> Iterator[native.Engine]:
    with native.Engine(kept_errors=10, kept_failures=40) as engine:
        yield engine


def fail(engine: native.Engine, why: str = "the device is gone") -> int:
    ticket = engine.external()
    engine.complete_external(ticket, why)
    return ticket


def result(engine: native.Engine, ticket: int) -> str:
    try:
        engine.wait(ticket)
    except native.ResultForgotten:
        return "forgotten"
    except RuntimeError as error:
        return str(error)
    return ""


def test_many_failures_take_no_more_memory(engine: native.Engine) -> None:
    for number in range(1000):
        fail(engine, f"failure {number}")
    stats = engine.stats()
    assert stats["failed_ops"] == 1000
    assert stats["kept_failures"] <= 50


def test_reads_that_fail_are_failures_for_ever(engine: native.Engine, file: native.File) -> None:
    """A read past the end: its error while it is kept, and never a success."""
    arena = native.Arena(4096, native.HugePages.OFF)
    buffer = native.Buffer(arena, [(0, 4096)], 4096)
    tickets = []
    for _ in range(200):
        tickets.append(engine.read(file, 1 << 30, [buffer]))
        with pytest.raises(OSError, match="read"):
            engine.wait(tickets[-1])
    for ticket in tickets[:190]:
        for _ in range(2):
            with pytest.raises(native.ResultForgotten, match="no longer known"):
                engine.wait(ticket)
    for ticket in tickets[190:]:
        with pytest.raises(OSError, match="read"):
            engine.wait(ticket)
    assert engine.stats()["kept_failures"] <= 50


def test_what_follows_an_old_failure_fails(engine: native.Engine) -> None:
    old = fail(engine)
    for _ in range(30):
        fail(engine)
    assert result(engine, engine.barrier([old])) == "forgotten"
    assert result(engine, engine.barrier()) == ""


def test_successes_stay_known_until_their_time_is_lost(engine: native.Engine) -> None:
    first, gate = engine.barrier(), engine.external()
    following = engine.barrier([gate])
    for _ in range(50):
        assert result(engine, first) == ""
        fail(engine)
    assert engine.stats()["kept_failures"] == 50, "none was dropped yet"
    between = engine.barrier()
    fail(engine)
    assert result(engine, first) == "forgotten", "as old as failures that were dropped"
    assert result(engine, between) == ""
    engine.complete_external(gate)
    assert engine.done(following), "what is unfinished is known, however old"
    late = engine.barrier([between])
    assert result(engine, late) == ""


@given(
    outcomes=st.lists(st.booleans(), max_size=120),
    errors=st.integers(0, 5),
    tickets=st.integers(0, 12),
    order=st.randoms(use_true_random=False),
)
def test_a_failure_is_never_taken_for_a_success(
    outcomes: list[bool], errors: int, tickets: int, order: object
) -> None:
    """Whatever the order in which they end; and while all are kept, no success is refused."""
    with native.Engine(kept_errors=errors, kept_failures=tickets) as engine:
        gates = [engine.external() for _ in outcomes]
        ended = list(zip(gates, outcomes, strict=True))
        order.shuffle(ended)  # type: ignore[attr-defined]
        for gate, failed in ended:
            engine.complete_external(gate, "failed" if failed else "")
        lost = sum(outcomes) > errors + tickets
        for gate, failed in ended:
            found = result(engine, gate)
            assert found if failed else lost or not found
        assert engine.stats()["kept_failures"] <= errors + tickets
