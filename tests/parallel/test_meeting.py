"""Ranks of one attempt find each other, whatever earlier attempts left with torchrun's agents."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from tierstore.errors import PeerError
from tierstore.parallel import RankEnvironment, job_store
from tierstore.parallel.job_store import meeting_store

SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture
def agents() -> TCPStore:
    """The store that torchrun's agents keep."""
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


def meet(agents: TCPStore, rank: int, timeout_s: float = 30.0) -> TCPStore:
    environment = RankEnvironment(rank=rank, world=2, local_rank=0, address=("127.0.0.1", agents.port))
    return meeting_store(environment, timeout_s, SHARED)


def test_ranks_meet_in_the_store_of_rank_0(agents: TCPStore) -> None:
    first = meet(agents, 0)
    second = meet(agents, 1)
    assert second.port == first.port != agents.port
    first.set("address", "here")
    assert second.get("address") == b"here"


def test_what_an_earlier_attempt_left_is_not_taken(agents: TCPStore) -> None:
    """Rank 1 comes first, while rank 0 of the earlier attempt still stands, and what it wrote with it."""
    old = meet(agents, 0)
    meet(agents, 1).set("address", "of the dead")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, agents, 1)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        new = meet(agents, 0)
        found = waiting.result(timeout=30)
    assert found.port == new.port != old.port
    assert not found.check(["address"])


def test_a_store_that_is_gone_is_not_waited_for(agents: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at its port any more, or another program does."""
    monkeypatch.setattr(job_store, "_PROBE_S", 1.0)
    other = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    other.set("token", "its own")
    for left in ("1 token", f"{other.port} token"):
        agents.set("tierstore/meeting", left)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(meet, agents, 1)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
            new = meet(agents, 0)
            assert waiting.result(timeout=30).port == new.port


def test_no_rank_0(agents: TCPStore) -> None:
    """As where torchrun sends the ranks of one attempt to different stores."""
    said = r"^joining: .*rank 1 of 2 found no rank 0 within 0.2 s at 127.0.0.1:\d+.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    with pytest.raises(PeerError, match=said):
        meet(agents, 1, timeout_s=0.2)


def test_without_a_store_of_the_agents_rank_0_keeps_the_one_at_the_address(agents: TCPStore) -> None:
    """``agents`` stands for it here: a process has one server at a port, which all of its stores share."""
    address = ("127.0.0.1", agents.port)
    second = meeting_store(RankEnvironment(rank=1, world=2, local_rank=0, address=address), 10.0, {})
    assert second.port == agents.port
    agents.set("address", "here")
    assert second.get("address") == b"here"
