"""Collectives whose sums have the same bits whatever arrives first and however messages are cut.

Sums are composed of all-to-alls of bytes and an addition in rank order, element by element, in fp32 for bf16 and fp16: so
no bit depends on arrival, on the backend's ring, or on the size of a message. It is also faster than Gloo's own: Gloo's
all-to-all has several times the bandwidth of its reduce-scatter and all-gather, which is why gathers use it too on Gloo.
NCCL gathers itself.

Order. All ranks of a group issue the same collectives in the same order, each from one thread at a time; issued
collectives may be waited for in any order.

Channels. A group has two communicators: STREAM for what runs ahead of computation (gathers, reductions), and
EXCHANGE for what computation blocks on (all-to-alls of tokens, flags), so that neither queues behind the
other. With Gloo a communicator costs three threads, which sleep unless it is used: one polls its sockets
and two run collectives, so that two collectives can run at once on each channel.

A group of one rank needs no process group: nothing is sent, and only the copies that a caller requests are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tierstore.accelerator import read
from tierstore.errors import PeerError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Makes the context in which a rank waits for others: a ledger's stall.
Charge = Callable[[], AbstractContextManager[None]]

_BLAME_S = 1.0  # a broken collective is often noticed before the failure that broke it is known
_SMALL_BYTES = 1 << 14  # below this size, one message of everything is faster than two of parts


class Collective(StrEnum):
    """The kinds of collectives, as counters and errors name them."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    OBJECTS = "all_gather_object"
    SEND = "send"


class Channel(StrEnum):
    """Which of a group's two communicators carries a collective."""

    STREAM = "stream"
    EXCHANGE = "exchange"


@dataclass(slots=True)
class CollectiveTraffic:
    """What this rank has sent to others of a group: ``sent_bytes`` in ``calls`` collectives, as ``messages`` (non-empty
    ones, counted per destination). Of these, ``node_messages`` and ``node_bytes`` went to other nodes.
    """

    calls: int = 0
    sent_bytes: int = 0
    messages: int = 0
    node_messages: int = 0
    node_bytes: int = 0

    def add(self, other: CollectiveTraffic) -> None:
        """Add the counts of ``other``."""
        self.calls += other.calls
        self.sent_bytes += other.sent_bytes
        self.messages += other.messages
        self.node_messages += other.node_messages
        self.node_bytes += other.node_bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the job cannot continue: the global rank that ended first (None: unknown), and its reason."""

    rank: int | None
    reason: str


class Work:
    """A running collective. Its tensors are in use, and its results undefined, until ``wait`` returns.

    With NCCL, ``wait`` orders the current stream after the collective instead of blocking the thread.
    """

    def __init__(
        self,
        pending: Any = None,
        *,
        finish: Callable[[], None] | None = None,
        explain: Callable[[RuntimeError], PeerError] | None = None,
    ) -> None:
        self._pending = pending
        self._finish = finish
        self._explain = explain
        self._charge: Charge | None = None
        self._observer: Callable[[], None] | None = None

    def then(self, finish: Callable[[], None] | None, charge: Charge | None) -> Work:
        """Sets what ``wait`` calls when the results of an all-to-all are there, and the default of its ``charge``."""
        assert self._finish is None  # an all-to-all leaves its results where they belong
        self._finish, self._charge = finish, charge
        return self

    def observe(self, ended: Callable[[], None]) -> None:
        """``ended`` is called once, by the first ``wait`` that returns; never if nothing was sent."""
        if self._pending is not None:
            self._observer = ended

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, without waiting for others."""
        return self._pending is None or bool(self._pending.is_completed())

    def wait(self, charge: Charge | None = None) -> None:
        """Wait for the results. Raises PeerError. After it has returned once, it returns at once. ``charge`` is used if it
        has to block.
        """
        charge = charge or self._charge
        if charge is None or self.done():
            self._complete()
        else:
            with charge():
                self._complete()

    def _complete(self) -> None:
        if self._pending is not None:
            try:
                self._pending.wait()
            except RuntimeError as error:
                if self._explain is None:
                    raise
                raise self._explain(error) from error
            self._pending = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        if self._observer is not None:
            self._observer()
            self._observer = None


class RankGroup:
    """The global ranks ``ranks`` (ascending); this process is number ``rank``.

    Raises ValueError for tensors that do not fit together. Every method but ``done`` and ``wait`` of a Work is a
    collective: all ranks call it, with the same shapes unless stated otherwise.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        communicators: dict[Channel, ProcessGroup],
        *,
        native_gather: bool = False,
        node_ranks: int = 0,
        blame: Callable[[float], Failure | None] | None = None,
    ) -> None:
        """``blame`` returns the failure that ended the job, if it is known within the given seconds. ``native_gather``: the
        backend gathers well itself (NCCL); ``node_ranks``: global ranks per node (0: all are on one).
        """
        self.rank = rank
        self.ranks = tuple(ranks)
        self.traffic: dict[Collective, CollectiveTraffic] = {
            operation: CollectiveTraffic() for operation in Collective
        }
        self._communicators = communicators
        self._native_gather = native_gather
        self._blame = blame
        node = [world_rank // node_ranks if node_ranks else 0 for world_rank in self.ranks]
        #: By rank of the group, whether it is on another node.
        self._elsewhere = [other != node[rank] for other in node]

    @staticmethod
    def alone(world_rank: int = 0) -> RankGroup:
        """The group of one rank."""
        return RankGroup(0, (world_rank,), {})

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def communicator(self, channel: Channel) -> ProcessGroup:
        """The process group behind ``channel``. All ranks must issue the same operations on it."""
        return self._communicators[channel]

    def close(self) -> None:
        """Drop the communicators; afterwards only a group of one can be used."""
        self._communicators = {}

    # Ahead of the computation ------------------------------------------------------------------------------

    def all_gather(
        self,
        out_flat: Tensor,
        piece: Tensor,
        *,
        scratch: Tensor | None = None,
        channel: Channel = Channel.STREAM,
    ) -> Work:
        """Rank r's ``piece`` (n,) becomes ``out_flat[r * n : (r + 1) * n]`` on all ranks.

        ``piece`` may be a view of its part of ``out_flat``. ``scratch``: memory like ``out_flat``, in use until the Work is
        complete; needed on Gloo with three or more ranks, and allocated if not given.
        """
        numel = piece.numel()
        _check_flat(out_flat, piece, self.size)
        own = out_flat[self.rank * numel : (self.rank + 1) * numel]
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece)
        if self.size == 1:
            return Work()
        if self._native_gather:
            return self._gather_natively(out_flat, piece, channel)
        if self.size == 2:
            # To and from the other only: no byte is copied that is not sent.
            other = 1 - self.rank
            splits = [numel if r == other else 0 for r in range(2)]
            target = out_flat[other * numel : (other + 1) * numel]
            return self._exchange(Collective.ALL_GATHER, channel, target, piece, splits, splits)
        repeated = torch.empty_like(out_flat) if scratch is None else scratch
        repeated.view(self.size, numel).copy_(piece.unsqueeze(0))
        splits = [numel] * self.size
        return self._exchange(Collective.ALL_GATHER, channel, out_flat, repeated, splits, splits)

    def reduce_scatter(self, in_flat: Tensor, out_piece: Tensor, *, scratch: Tensor | None = None) -> Work:
        """``out_piece`` (n,) becomes the sum over ranks, in rank order, of ``in_flat[r * n : (r + 1) * n]``.

        The sum is computed in the wider of fp32 and the type of ``out_piece``, which may be wider than ``in_flat``, and
        rounded once. ``out_piece`` may be any memory except ``scratch``: memory like ``in_flat``, in use until the Work is
        complete, and allocated if not given.
        """
        _check_flat(in_flat, out_piece, self.size, same_type=False)
        numel = out_piece.numel()
        if self.size == 1:
            if out_piece.data_ptr() != in_flat.data_ptr():
                out_piece.copy_(in_flat)
            return Work()
        received = torch.empty_like(in_flat) if scratch is None else scratch
        splits = [numel] * self.size
        return self._exchange(
            Collective.REDUCE_SCATTER,
            Channel.STREAM,
            received,
            in_flat,
            splits,
            splits,
            finish=lambda: _ordered_sum(received.view(self.size, numel), out_piece),
        )

    # What the computation blocks on ------------------------------------------------------------------------

    def all_to_all(
        self,
        out_rows: Tensor,
        in_rows: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        *,
        channel: Channel = Channel.EXCHANGE,
    ) -> Work:
        """``in_splits[r]`` rows go to rank r; ``out_splits[r]`` rows come from it. Zeros are fine."""
        if len(out_splits) != self.size or len(in_splits) != self.size:
            raise ValueError(f"expected {self.size} splits, got {len(out_splits)} and {len(in_splits)}")
        check_rows(out_rows, in_rows, sum(out_splits), sum(in_splits))
        if self.size == 1:
            out_rows.copy_(in_rows)
            return Work()
        return self._exchange(Collective.ALL_TO_ALL, channel, out_rows, in_rows, out_splits, in_splits)

    def all_reduce(self, *tensors: Tensor, channel: Channel = Channel.EXCHANGE) -> Work:
        """Replace each of ``tensors`` (of one type) by its sum over ranks, in rank order: the same bits everywhere.

        They travel in one message. On more than two ranks, a large sum is a reduction of one part on each rank and a
        gather of the parts, which ``wait`` issues: ranks must then also wait in the same order.
        """
        if self.size == 1:
            return Work()
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("expected contiguous tensors")
        flats = [tensor.view(-1) for tensor in tensors]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)

        def spread() -> None:
            if len(flats) > 1:
                for own, summed in zip(flats, torch.split(flat, [own.numel() for own in flats]), strict=True):
                    own.copy_(summed)

        if self.size == 2:
            return self._swap_and_add(flat, channel, spread)
        if flat.numel() * flat.element_size() <= _SMALL_BYTES:
            gathered = flat.new_empty((self.size, flat.numel()))

            def finish() -> None:
                _ordered_sum(gathered, flat)
                spread()

            return self._gather_small(gathered, flat, channel, finish)
        return self._reduce_and_gather(flat, channel, spread)

    def max(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its maximum over ranks, element by element; NaN if any rank has one."""
        if self.size > 1:
            gathered = tensor.new_empty((self.size, tensor.numel()))

            def finish() -> None:
                torch.amax(gathered, dim=0, out=tensor.view(-1))

            self._gather_small(gathered, tensor, Channel.EXCHANGE, finish).wait()

    def any(self, flag: bool) -> bool:
        """Whether any rank's ``flag`` is set."""
        value = torch.tensor([int(flag)])
        self.max(value)
        return bool(value)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.any(False)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order: pickled, for small control data."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        self.traffic[Collective.OBJECTS].calls += 1
        try:
            dist.all_gather_object(found, value, group=self._communicators[Channel.EXCHANGE])
        except RuntimeError as error:
            raise self.explained(Collective.OBJECTS, error) from error
        return found

    def read(self, gathered: Tensor) -> Tensor:
        """Copy to the host what ``all_gather`` has received. Not a collective. Raises PeerError if the job has failed: where
        ``wait`` does not wait for the device (NCCL), a communicator that was aborted meanwhile has left garbage.
        """
        (found,) = read(gathered)
        if (failed := self._failed(Collective.ALL_GATHER, within_s=0.0)) is not None:
            raise failed
        return found

    # Messages from one rank to another ---------------------------------------------------------------------

    def sending(self, nbytes: int, channel: Channel = Channel.EXCHANGE) -> int:
        """Called before a message of ``nbytes`` to one other rank is issued on the communicator itself. Returns when it will
        have arrived (ns of the monotonic clock), which its receiver waits for; 0 if no link is limited.
        """
        traffic = self.traffic[Collective.SEND]
        traffic.calls += 1
        traffic.sent_bytes += nbytes
        return 0

    def explained(self, operation: Collective, error: RuntimeError) -> PeerError:
        """The PeerError for ``error`` of a communicator: the job cannot continue; names the rank to blame if known."""
        return self._failed(operation, within_s=_BLAME_S) or PeerError(
            operation, str(error).split("\n", 1)[0]
        )

    def _failed(self, operation: Collective, *, within_s: float) -> PeerError | None:
        """The PeerError for the failure that ended the job, if it is known within ``within_s``."""
        failure = None if self._blame is None else self._blame(within_s)
        return None if failure is None else PeerError(operation, failure.reason, rank=failure.rank)

    # What all of them are made of --------------------------------------------------------------------------

    def _swap_and_add(self, flat: Tensor, channel: Channel, spread: Callable[[], None]) -> Work:
        theirs = torch.empty_like(flat)

        def finish() -> None:
            # With two ranks the order does not matter: addition commutes.
            _ordered_sum([flat, theirs], flat)
            spread()

        splits = [0 if r == self.rank else flat.numel() for r in range(2)]
        return self._exchange(Collective.ALL_REDUCE, channel, theirs, flat, splits, splits, finish=finish)

    def _reduce_and_gather(self, flat: Tensor, channel: Channel, spread: Callable[[], None]) -> Work:
        share, more = divmod(flat.numel(), self.size)
        parts = [share + (r < more) for r in range(self.size)]
        mine = [parts[self.rank]] * self.size
        received = flat.new_empty(sum(mine))

        def finish() -> None:
            piece = flat.new_empty(mine[0])
            _ordered_sum(received.view(self.size, mine[0]), piece)
            repeated = piece.repeat(self.size)
            gathering = self._exchange(Collective.ALL_REDUCE, channel, flat, repeated, parts, mine)
            gathering.wait()
            spread()

        return self._exchange(Collective.ALL_REDUCE, channel, received, flat, mine, parts, finish=finish)

    def _gather_small(
        self, gathered: Tensor, tensor: Tensor, channel: Channel, finish: Callable[[], None]
    ) -> Work:
        if not tensor.is_contiguous():
            raise ValueError("expected a contiguous tensor")
        repeated = tensor.view(1, -1).repeat(self.size, 1)
        splits = [1] * self.size
        return self._exchange(
            Collective.ALL_REDUCE, channel, gathered, repeated, splits, splits, finish=finish
        )

    def _gather_natively(self, out_flat: Tensor, piece: Tensor, channel: Channel) -> Work:
        import torch.distributed as dist

        group = self._communicators[channel]
        return self._issue(
            Collective.ALL_GATHER,
            channel,
            [piece.numel() * piece.element_size()] * self.size,
            # Not into a list of views: NCCL would gather into its own memory and copy.
            lambda: dist.all_gather_into_tensor(out_flat, piece, group=group, async_op=True),
        )

    def _exchange(
        self,
        operation: Collective,
        channel: Channel,
        out: Tensor,
        given: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        *,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        import torch.distributed as dist

        group = self._communicators[channel]
        out_bytes, in_bytes = _rows_of_bytes(out), _rows_of_bytes(given)
        width = given[:1].numel() * given.element_size()
        return self._issue(
            operation,
            channel,
            [rows * width for rows in in_splits],
            lambda: dist.all_to_all_single(
                out_bytes, in_bytes, list(out_splits), list(in_splits), group=group, async_op=True
            ),
            finish,
        )

    def _issue(
        self,
        operation: Collective,
        channel: Channel,
        sent: Sequence[int],
        start: Callable[[], Any],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Send each other rank ``sent[rank]`` bytes: every collective is made of these, and ``LimitedGroup`` gives each its
        turn on a link.
        """
        traffic = self.traffic[operation]
        traffic.calls += 1
        for rank, nbytes in enumerate(sent):
            if rank == self.rank or not nbytes:
                continue
            traffic.messages += 1
            traffic.sent_bytes += nbytes
            if self._elsewhere[rank]:
                traffic.node_messages += 1
                traffic.node_bytes += nbytes
        try:
            pending = start()
        except RuntimeError as error:
            raise self.explained(operation, error) from error
        return Work(pending, finish=finish, explain=lambda error: self.explained(operation, error))


@contextlib.contextmanager
def uncounted(*groups: RankGroup) -> Iterator[None]:
    """Do not count what ``groups`` send in the block as traffic."""
    counts = [sent for group in groups for sent in group.traffic.values()]
    before = [replace(sent) for sent in counts]
    yield
    for sent, was in zip(counts, before, strict=True):
        for each in fields(CollectiveTraffic):
            setattr(sent, each.name, getattr(was, each.name))


def check_rows(out_rows: Tensor, in_rows: Tensor, came: int, go: int) -> None:
    """Raise ValueError unless ``came`` rows fit ``out_rows`` and ``go`` rows fit ``in_rows``, with rows alike."""
    if out_rows.shape[0] != came or in_rows.shape[0] != go:
        raise ValueError(
            f"splits of {came} and {go} rows do not fit tensors of {out_rows.shape[0]} and {in_rows.shape[0]}"
        )
    if out_rows.dtype != in_rows.dtype or out_rows.shape[1:] != in_rows.shape[1:]:
        raise ValueError(
            f"rows must be alike: {out_rows.dtype} {tuple(out_rows.shape[1:])} and "
            f"{in_rows.dtype} {tuple(in_rows.shape[1:])}"
        )
    if not (out_rows.is_contiguous() and in_rows.is_contiguous()):
        raise ValueError("expected contiguous tensors")


def _check_flat(whole: Tensor, piece: Tensor, size: int, *, same_type: bool = True) -> None:
    if whole.dim() != 1 or piece.dim() != 1 or whole.numel() != size * piece.numel():
        raise ValueError(
            f"expected flat tensors of {size} x n and n elements, got {tuple(whole.shape)} and "
            f"{tuple(piece.shape)}"
        )
    if same_type and whole.dtype != piece.dtype:
        raise ValueError(f"expected one type, got {whole.dtype} and {piece.dtype}")
    if not (whole.is_contiguous() and piece.is_contiguous()):
        raise ValueError("expected contiguous tensors")


def _rows_of_bytes(rows: Tensor) -> Tensor:
    """The same memory as bytes, so that no backend's types or rounding matter."""
    return rows.view(rows.shape[0], -1).view(torch.uint8) if rows.numel() else rows.new_empty(0).byte()


def _ordered_sum(pieces: Sequence[Tensor] | Tensor, out_N: Tensor) -> None:
    """``out = pieces[0] + pieces[1] + ...``, from the left. ``out`` may be the first piece itself."""
    narrow = out_N.dtype in (torch.bfloat16, torch.float16)
    total_N = out_N.new_empty(out_N.shape, dtype=torch.float32) if narrow else out_N
    if total_N.data_ptr() != pieces[0].data_ptr():
        total_N.copy_(pieces[0])
    for piece_N in pieces[1:]:
        total_N.add_(piece_N)
    if narrow:
        out_N.copy_(total_N)
