"""Messages that are issued on a communicator itself: counted, and limited by when their receivers may have them."""

import time

import pytest

from tierstore._native import Link
from tierstore.parallel import Collective, RankGroup
from tierstore.parallel.limited import LimitedGroup


def test_a_message_is_counted() -> None:
    group = RankGroup(0, (0, 1), {})
    assert group.sending(40) == 0
    assert group.sending(2) == 0
    sent = group.traffic[Collective.SEND]
    assert (sent.calls, sent.sent_bytes) == (2, 42)


def test_a_limited_message_has_its_turn_on_the_link() -> None:
    """1,000 bytes at 1,000 bytes a second take a second; the second message waits for the first."""
    group = LimitedGroup(0, (0, 1), {}, link=Link(1000.0, 0.0))
    before = time.monotonic_ns()
    first, second = group.sending(1000), group.sending(500)
    assert first >= before + 1_000_000_000
    assert second - first == pytest.approx(500_000_000, abs=1000)
    assert group.traffic[Collective.SEND].sent_bytes == 1500


def test_what_a_communicator_raises_names_who_ended() -> None:
    group = RankGroup(0, (0, 1), {})
    error = group.explained(Collective.SEND, RuntimeError("closed\nby peer"))
    assert "send" in str(error)
    assert "closed" in str(error)
