"""Collectives on real ranks: against torch's own, against sums by hand, and at the edges."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launcher import Ranks
from torch import Tensor

from tierstore.errors import PeerError
from tierstore.parallel import Channel, Collective, LimitedGroup, Mesh, RankGroup, Work
from tierstore.parallel.collectives import Failure

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Values whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** (rank % 3)
    return (values * 100).to(dtype) if dtype == torch.int64 else values.to(dtype)


def _gather(mesh: Mesh, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    group = mesh.world
    piece = _values(group.rank, numel, dtype)
    ours = torch.full((group.size * numel,), 7, dtype=dtype)
    group.all_gather(ours, piece).wait()
    theirs = [torch.empty_like(piece) for _ in range(group.size)]
    dist.all_gather(theirs, piece)
    in_place = torch.zeros_like(ours)
    own = in_place[group.rank * numel : (group.rank + 1) * numel]
    own.copy_(piece)
    work = group.all_gather(in_place, own, scratch=torch.empty_like(ours))
    seen: list[bool] = []
    work.observe(lambda: seen.append(torch.equal(in_place, ours)))
    assert seen == []
    work.wait()
    work.wait()
    assert seen == [True], "called once, with the result there"
    assert work.done()
    assert torch.equal(in_place, ours)
    native = RankGroup(group.rank, group.ranks, group._communicators, native_gather=True)
    through_backend = torch.zeros_like(ours)
    native.all_gather(through_backend, piece).wait()
    assert torch.equal(through_backend, ours)
    in_its_place = torch.zeros_like(ours)
    own = in_its_place[group.rank * numel : (group.rank + 1) * numel]
    own.copy_(piece)
    native.all_gather(in_its_place, own).wait()
    assert torch.equal(in_its_place, ours)
    return ours, torch.cat(theirs)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_all_gather(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    for ours, theirs in ranks.run(size, _gather, 1000, dtype):
        assert torch.equal(ours, theirs)


def _reduce(mesh: Mesh, numel: int, cut: int, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """This rank's piece of the sum, by messages of ``cut`` elements a rank, waited for out of order."""
    group = mesh.world
    whole = _values(group.rank, group.size * numel, dtype).view(group.size, numel)
    out = torch.full((numel,), 7, dtype=wide)
    works = []
    for begin in range(0, numel, cut):
        part = whole[:, begin : begin + cut].contiguous().view(-1)
        works.append(group.reduce_scatter(part, out[begin : begin + cut]))
    for work in reversed(works):
        work.wait()
    return out


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_reduce_scatter_adds_in_rank_order_whatever_the_messages(
    ranks: Ranks, size: int, dtype: torch.dtype, wide: torch.dtype
) -> None:
    numel = 600
    total = _values(0, size * numel, dtype).to(torch.promote_types(dtype, torch.float32))
    for rank in range(1, size):
        total = total + _values(rank, size * numel, dtype).to(total.dtype)
    expected = total.to(wide).view(size, numel)
    for cut in (600, 7):
        for rank, found in enumerate(ranks.run(size, _reduce, numel, cut, dtype, wide)):
            assert torch.equal(found, expected[rank])


def _exchange(mesh: Mesh, counts: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    group = mesh.world
    sends = counts[group.rank]
    takes = [row[group.rank] for row in counts]
    rows = _values(group.rank, sum(sends) * width, torch.float32).view(-1, width)
    out = torch.empty(sum(takes), width)
    group.all_to_all(out, rows, takes, sends).wait()
    reference = torch.empty(sum(takes), width)
    dist.all_to_all_single(reference, rows, takes, sends)
    narrow = torch.empty(sum(takes), width, dtype=torch.bfloat16)
    group.all_to_all(narrow, rows.bfloat16(), takes, sends).wait()
    assert torch.equal(narrow, reference.bfloat16())
    return out, reference


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2], [3, 4]],
        [[0, 5], [0, 0]],
        [[0, 0], [0, 0]],
        [[0, 1, 2, 3], [3, 0, 1, 2], [0, 0, 0, 0], [9, 0, 4, 0]],
    ],
)
def test_all_to_all_with_uneven_and_empty_splits(ranks: Ranks, counts: list[list[int]]) -> None:
    for ours, theirs in ranks.run(len(counts), _exchange, counts, 5):
        assert torch.equal(ours, theirs)


def _small(mesh: Mesh) -> dict[str, Any]:
    group = mesh.world
    total = _values(group.rank, 50, torch.float32)
    group.all_reduce(total).wait()
    streamed = _values(group.rank, 50, torch.float32).view(5, 10)
    work = group.all_reduce(streamed, channel=Channel.STREAM)
    largest = torch.tensor([float(group.rank), -float(group.rank), 1.0])
    if group.rank == 1:
        largest[2] = math.nan
    group.max(largest)
    work.wait()
    group.barrier()
    return {
        "total": total,
        "streamed": streamed.view(-1),
        "largest": largest,
        "any": (group.any(group.rank == 1), group.any(False)),
        "objects": group.all_gather_object({"rank": group.rank}),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_small_reductions_are_the_same_on_all_ranks(ranks: Ranks, size: int) -> None:
    total = _values(0, 50, torch.float32)
    for rank in range(1, size):
        total = total + _values(rank, 50, torch.float32)
    for found in ranks.run(size, _small):
        assert torch.equal(found["total"], total)
        assert torch.equal(found["streamed"], total)
        assert found["largest"][:2].tolist() == [size - 1, 0]
        assert math.isnan(found["largest"][2])
        assert found["any"] == (True, False)
        assert found["objects"] == [{"rank": rank} for rank in range(size)]


def _channels(mesh: Mesh) -> bool:
    """Exchanges complete while a gather that the last rank has not joined yet is under way."""
    group = mesh.world
    out = torch.empty(group.size * 8)
    late = group.rank == group.size - 1
    works = []
    if not late:
        works = [group.all_gather(out, torch.full((8,), float(group.rank))) for _ in range(4)]
    group.barrier()
    waiting = late or not works[0].done()
    group.barrier()
    if late:
        works = [group.all_gather(out, torch.full((8,), float(group.rank))) for _ in range(4)]
    for work in works:
        work.wait()
    assert torch.equal(out.view(group.size, 8)[:, 0], torch.arange(float(group.size)))
    return waiting


@pytest.mark.parametrize("size", [2, 4])
def test_exchanges_do_not_queue_behind_gathers(ranks: Ranks, size: int) -> None:
    assert all(ranks.run(size, _channels))


def _counted(mesh: Mesh) -> dict[str, tuple[int, int]]:
    group = mesh.world
    before = {kind: (t.calls, t.sent_bytes) for kind, t in group.traffic.items()}
    group.all_gather(torch.empty(group.size * 10), torch.ones(10)).wait()
    group.reduce_scatter(torch.ones(group.size * 10).bfloat16(), torch.empty(10)).wait()
    splits = [2] * group.size
    rows = torch.ones(2 * group.size, 3)
    group.all_to_all(torch.empty_like(rows), rows, splits, splits).wait()
    return {
        kind: (t.calls - before[kind][0], t.sent_bytes - before[kind][1]) for kind, t in group.traffic.items()
    }


def test_traffic_is_what_goes_to_others(ranks: Ranks) -> None:
    for found in ranks.run(4, _counted):
        assert found == {
            Collective.ALL_GATHER: (1, 3 * 40),
            Collective.REDUCE_SCATTER: (1, 3 * 20),
            Collective.ALL_TO_ALL: (1, 3 * 24),
            Collective.ALL_REDUCE: (0, 0),
            Collective.OBJECTS: (0, 0),
            Collective.SEND: (0, 0),
        }


def test_one_rank_needs_no_process_group() -> None:
    group = RankGroup.alone()
    values = _values(0, 12, torch.float32)
    out = torch.empty(12)
    group.all_gather(out, values).wait()
    assert torch.equal(out, values)
    narrow = values.bfloat16()
    group.reduce_scatter(narrow, out).wait()
    assert torch.equal(out, narrow.float())
    rows = torch.empty(4, 3)
    group.all_to_all(rows, values.view(4, 3), [4], [4]).wait()
    assert torch.equal(rows.view(-1), values)
    group.all_reduce(rows).wait()
    group.max(rows)
    assert torch.equal(rows.view(-1), values)
    assert group.any(True)
    assert not group.any(False)
    assert group.all_gather_object("x") == ["x"]
    group.barrier()
    assert all(traffic.calls == 0 for traffic in group.traffic.values())
    assert not dist.is_initialized()


def test_tensors_that_do_not_fit_are_refused() -> None:
    group = RankGroup.alone()
    with pytest.raises(ValueError, match=r"1 x n and n elements, got \(3,\) and \(2,\)"):
        group.all_gather(torch.empty(3), torch.empty(2))
    with pytest.raises(ValueError, match="expected one type"):
        group.all_gather(torch.empty(2).double(), torch.empty(2))
    with pytest.raises(ValueError, match="expected contiguous"):
        group.reduce_scatter(torch.empty(4)[::2], torch.empty(2))
    with pytest.raises(ValueError, match="expected 1 splits, got 2"):
        group.all_to_all(torch.empty(2, 2), torch.empty(2, 2), [1, 1], [2])
    with pytest.raises(ValueError, match="splits of 2 and 1 rows do not fit"):
        group.all_to_all(torch.empty(2, 2), torch.empty(2, 2), [2], [1])
    with pytest.raises(ValueError, match="rows must be alike"):
        group.all_to_all(torch.empty(2, 2), torch.empty(2, 3), [2], [2])
    with pytest.raises(ValueError, match="expected contiguous"):
        group.all_to_all(torch.empty(2, 2), torch.empty(2, 2).t(), [2], [2])


def _summed(mesh: Mesh, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    tensors = [_values(mesh.world.rank + 10 * i, numel, dtype) for i, numel in enumerate(sizes)]
    works = [mesh.world.all_reduce(*tensors, channel=Channel.STREAM)]
    again = [_values(mesh.world.rank + 10 * i, numel, dtype) for i, numel in enumerate(sizes)]
    works += [mesh.world.all_reduce(tensor) for tensor in again]
    for work in works:
        work.wait()
    for together, apart in zip(tensors, again, strict=True):
        assert torch.equal(together, apart)
    return tensors


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_the_same_alone_together_and_in_parts(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    sizes = [5, 9001, 1]
    found = ranks.run(size, _summed, sizes, dtype)
    for i, numel in enumerate(sizes):
        total = _values(10 * i, numel, dtype).float()
        for rank in range(1, size):
            total = total + _values(rank + 10 * i, numel, dtype).float()
        for tensors in found:
            assert torch.equal(tensors[i], total.to(dtype))


class _Pending:
    """A collective of the backend that completes when it is waited for."""

    def __init__(self) -> None:
        self.completed = False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        self.completed = True


def test_waiting_is_charged_when_it_blocks_and_results_come_once() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def charge() -> Iterator[None]:
        events.append("blocked")
        yield
        events.append("went on")

    work = Work(_Pending(), finish=lambda: events.append("finished"))
    assert not work.done()
    work.wait(charge)
    assert events == ["blocked", "finished", "went on"]
    assert work.done()
    work.wait(charge)
    assert len(events) == 3
    pending = _Pending()
    pending.completed = True
    Work(pending, finish=lambda: events.append("at once")).wait(charge)
    assert events[3:] == ["at once"]


def _over_a_link(mesh: Mesh) -> tuple[bool, list[int]]:
    """A gather of 40 bytes to one other, over a link that lets them pass at a time of its own."""
    link = _Link()
    group = LimitedGroup(mesh.world.rank, mesh.world.ranks, mesh.world._communicators, link=link)
    out = torch.empty(20)
    work = group.all_gather(out, torch.full((10,), float(group.rank)))
    group.all_gather_object(None)
    passed_before = time.monotonic_ns() >= link.passes_ns
    early = work.done() and not passed_before
    work.wait()
    assert time.monotonic_ns() >= link.passes_ns
    assert torch.equal(out, torch.arange(2.0).repeat_interleave(10))
    return early, link.messages


class _Link:
    def __init__(self) -> None:
        self.messages: list[int] = []
        self.passes_ns = 0

    def reserve(self, nbytes: int) -> int:
        self.messages.append(nbytes)
        self.passes_ns = time.monotonic_ns() + 50_000_000
        return self.passes_ns


def test_a_limited_link_delays_what_has_arrived(ranks: Ranks) -> None:
    assert ranks.run(2, _over_a_link) == [(False, [40])] * 2


def _over_two_links(mesh: Mesh) -> tuple[list[int], list[int]]:
    """A gather ahead of computation, and an exchange that it blocks on."""
    link, exchange = _Link(), _Link()
    world = mesh.world
    group = LimitedGroup(world.rank, world.ranks, world._communicators, link=link, exchange=exchange)
    gathering = group.all_gather(torch.empty(20), torch.ones(10))
    group.all_to_all(torch.empty(2, 3), torch.ones(2, 3), [1, 1], [1, 1]).wait()
    gathering.wait()
    return link.messages, exchange.messages


def test_what_computation_blocks_on_may_have_a_link_of_its_own(ranks: Ranks) -> None:
    assert ranks.run(2, _over_two_links) == [([40], [12])] * 2


def test_what_an_aborted_communicator_leaves_is_not_read() -> None:
    """NCCL does not raise where the host has not waited for the device: then the failure of a rank is asked for."""
    known: list[Failure] = []
    group = RankGroup(0, (0, 1), {}, blame=lambda within_s: known[0] if known else None)
    gathered = torch.arange(6).view(2, 3)
    assert torch.equal(group.read(gathered), gathered)
    known.append(Failure(1, "its process ended"))
    with pytest.raises(PeerError) as raised:
        group.read(gathered)
    assert (raised.value.rank, raised.value.operation) == (1, "all_gather")
