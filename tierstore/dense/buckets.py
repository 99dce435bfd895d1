"""Gradient buckets: gradients are collected in preallocated flat memory, and reduced a bucket at a time.

A parameter group's gradients have one flat buffer, laid out like its parameters; a *bucket* is a run of whole parameters
in it. Once all gradients of a bucket have arrived, each rank receives the part of the bucket in its slice from all ranks,
and adds the parts in rank order, in fp32. So bits depend neither on the order of arrival nor on the cut into buckets. All
ranks send buckets in the same order, whatever order their gradients arrive in: parameter groups from the last to the
first, parameters from the last to the first. A parameter that the backward pass did not reach sends zeros.

Blocks share ``buffers`` flat buffers; the first and the last group share one more. If all are in use, the exchange waits
for the oldest reduction, so the peak does not depend on the number of blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tierstore.accelerator import following, has_own_memory, pinned_bytes, reached
from tierstore.dense.fusion import DenseMessages
from tierstore.dense.layout import Gathered, Region, Span, UnitLayout
from tierstore.dense.slices import UnitSlices
from tierstore.errors import BudgetError
from tierstore.parallel import Channel, RankGroup, Work


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements ``[begin, end)`` of a region: ``spans`` and, after the last of the region, padding.

    ``base``: the start of the region in the group's flat gradients; ``slice_base``: in a rank's slices.
    """

    region: Region
    base: int
    slice_base: int
    begin: int
    end: int
    spans: tuple[Span, ...]

    def part(self, rank: int) -> tuple[int, int]:
        """The part in the slice of ``rank``: begin and end in the region, equal if it is empty."""
        low = max(self.begin, rank * self.region.slice_numel)
        high = min(self.end, (rank + 1) * self.region.slice_numel)
        return low, max(low, high)


def buckets_of(layout: UnitLayout, bucket_bytes: int) -> list[Bucket]:
    """The group's buckets in sending order, each closed once it has ``bucket_bytes`` of fp32. Gradients of divided tables
    are in no bucket: they arrive on the ranks that own the rows.
    """
    found: list[Bucket] = []
    base = slice_base = 0
    for region in layout.regions:
        if region.gathered is Gathered.NO:
            slice_base += region.slice_numel
            continue
        mine: list[Bucket] = []
        end, spans = region.padded_numel, deque[Span]()
        for span in reversed(region.spans):
            spans.appendleft(span)
            if (end - span.offset) * 4 >= bucket_bytes or span.offset == 0:
                mine.append(Bucket(region, base, slice_base, span.offset, end, tuple(spans)))
                end = span.offset
                spans.clear()
        found = mine + found  # narrow (large) regions first
        base += region.padded_numel
        slice_base += region.slice_numel
    return found


@dataclass(slots=True, eq=False)
class _Slot:
    """Flat fp32 memory for one group's gradients, and for the parts from other ranks; ``landing``: pinned memory of a slice,
    where slices are on the host and gradients are not.
    """

    sent: Tensor
    received: Tensor
    ends: bool
    landing: Tensor | None


@dataclass(slots=True, eq=False)
class _Flight:
    """A parameter group whose gradients are arriving or being reduced."""

    unit: int
    slot: _Slot
    arrived: set[int] = field(default_factory=set)
    works: list[tuple[Bucket, Work]] = field(default_factory=list)
    #: Sums that are copied to the host, each with its place in the slices; and when all of them are there.
    sums: list[tuple[Tensor, slice]] = field(default_factory=list)
    copied: torch.Event | None = None


class GradientExchange:
    """Takes the gradients of parameter groups as they are computed, and adds their sums over ranks to the slices'
    gradients."""

    def __init__(
        self,
        slices: Sequence[UnitSlices],
        group: RankGroup,
        device: torch.device,
        *,
        bucket_bytes: int,
        buffers: int,
        messages: DenseMessages,
    ) -> None:
        self._slices = slices
        self._group = group
        self._messages = messages
        self._buckets = [buckets_of(unit.layout, bucket_bytes) for unit in slices]
        self._places = [dict(_placed(unit.layout)) for unit in slices]
        self._ends = {0, len(slices) - 1}
        sizes = [unit.layout.exchanged_numel for unit in slices]
        between = [size for unit, size in enumerate(sizes) if unit not in self._ends]
        #: The stream of sums and of their copies to slices on the host; None if slices are on ``device``.
        self._downloads: torch.Stream | None = None
        if has_own_memory(device) and not any(has_own_memory(unit.gradient.device) for unit in slices):
            self._downloads = torch.Stream(device)
        landing = 0 if self._downloads is None else group.size
        self._free = [_slot(max(sizes[unit] for unit in self._ends), device, landing, ends=True)]
        for _ in range(min(buffers, len(between))):
            self._free.append(_slot(max(between), device, landing, ends=False))
        self.nbytes = sum((slot.sent.numel() + slot.received.numel()) * 4 for slot in self._free)
        #: Bytes of pinned host memory.
        self.staging = sum(
            pinned_bytes(slot.landing.nbytes) for slot in self._free if slot.landing is not None
        )
        self._filling: dict[int, _Flight] = {}  # groups with unsent buckets
        self._under_way: deque[_Flight] = deque()  # groups with all buckets sent, oldest first
        self._due = -1  # the group whose buckets are sent next; all above it are sent

    def begin(self) -> None:
        """Prepares for a backward pass. Raises RuntimeError if the last one was left in the middle."""
        last = len(self._slices) - 1
        if self._filling or 0 <= self._due < last:
            raise RuntimeError("a backward pass begins before the last one has ended")
        self._due = last

    def again(self, unit: int) -> None:
        """Prepares for gradients of ``unit`` from another micro-batch. Raises RuntimeError if those of another group are
        due.
        """
        if self._filling or self._due not in (unit, unit - 1):
            raise RuntimeError(f"gradients of {self._slices[unit].layout.name} are not due")
        self._due = unit

    def arrive(self, unit: int, index: int, gradient: Tensor) -> None:
        """The gradient of parameter ``index`` of ``unit`` is complete for this backward pass."""
        if unit > self._due:
            raise RuntimeError(
                f"a gradient of {self._slices[unit].layout.name} arrives after its group's backward pass"
            )
        flight = self._filling.get(unit) or self._open(unit)
        offset, span = self._places[unit][index]
        flight.slot.sent[offset : offset + span.numel].view(span.shape).copy_(gradient)
        flight.arrived.add(index)
        while self._due in self._filling and self._send_complete(self._filling[self._due]):
            self._sent(self._due)

    def flush(self, unit: int) -> None:
        """Ends the backward passes of ``unit`` and of all groups above it: missing gradients are zero."""
        while self._due >= unit:
            flight = self._filling.get(self._due) or self._open(self._due)
            for index, (offset, span) in self._places[self._due].items():
                if index not in flight.arrived:
                    flight.slot.sent[offset : offset + span.numel].zero_()
                    flight.arrived.add(index)
            self._send_complete(flight)
            self._sent(self._due)

    def finish(self, unit: int | None = None) -> None:
        """Waits until the gradient of ``unit`` (None: of all groups) is in its slices. Their passes must be over."""
        if self._filling and self._due >= (unit or 0):
            raise RuntimeError("gradients are requested before their backward pass has ended")
        for flight in [f for f in self._under_way if unit is None or f.unit == unit]:
            self._complete(flight)

    # One parameter group ------------------------------------------------------------------------------------

    def _open(self, unit: int) -> _Flight:
        ends = unit in self._ends
        while (slot := next((s for s in self._free if s.ends is ends), None)) is None:
            oldest = next((flight for flight in self._under_way if flight.slot.ends is ends), None)
            if oldest is None:
                raise BudgetError(
                    f"dense.gradient_buffers: gradients of {self._slices[unit].layout.name} arrive while all buffers "
                    "hold incomplete gradients of other parameter groups; one more is needed"
                )
            self._complete(oldest)
        self._free.remove(slot)
        flight = self._filling[unit] = _Flight(unit, slot)
        return flight

    def _sent(self, unit: int) -> None:
        flight = self._filling.pop(unit)
        self._under_way.append(flight)
        self._due = unit - 1
        if self._downloads is not None:
            with following(self._downloads):
                self._add_up(flight)
                flight.copied = reached(self._downloads.device)

    def _send_complete(self, flight: _Flight) -> bool:
        """Sends the next complete buckets; returns whether all have been sent."""
        buckets = self._buckets[flight.unit]
        while len(flight.works) < len(buckets):
            bucket = buckets[len(flight.works)]
            if not all(span.index in flight.arrived for span in bucket.spans):
                return False
            flight.works.append((bucket, self._send(bucket, flight)))
        return True

    def _send(self, bucket: Bucket, flight: _Flight) -> Work:
        group, slot = self._group, flight.slot
        slot.sent[bucket.base + max(bucket.region.numel, bucket.begin) : bucket.base + bucket.end].zero_()
        splits = [high - low for low, high in (bucket.part(rank) for rank in range(group.size))]
        mine = splits[group.rank]
        given = slot.sent[bucket.base + bucket.begin : bucket.base + bucket.end]
        work = group.all_to_all(
            self._received(bucket, slot), given, [mine] * group.size, splits, channel=Channel.STREAM
        )
        if group.size > 1:
            self._messages.reduced(work, self._slices[flight.unit].layout.name, (given.numel() - mine) * 4)
        return work

    def _received(self, bucket: Bucket, slot: _Slot) -> Tensor:
        low, high = bucket.part(self._group.rank)
        size = self._group.size
        start = bucket.base + (low - self._group.rank * bucket.region.slice_numel) * size if high > low else 0
        return slot.received[start : start + (high - low) * size]

    def _complete(self, flight: _Flight) -> None:
        self._under_way.remove(flight)
        if flight.copied is None:
            self._add_up(flight)
        else:
            flight.copied.synchronize()
        gradient = self._slices[flight.unit].gradient
        for total, place in flight.sums:
            gradient[place].add_(total)
        self._free.append(flight.slot)

    def _add_up(self, flight: _Flight) -> None:
        """Waits for each bucket, and adds the parts of the ranks up; on the way to slices on the host."""
        rank, landing, landed = self._group.rank, flight.slot.landing, 0
        for bucket, work in flight.works:
            work.wait()
            low, high = bucket.part(rank)
            if high == low:
                continue
            rows = self._received(bucket, flight.slot).view(self._group.size, high - low)
            total = rows[0]
            for row in rows[1:]:
                total.add_(row)
            if landing is not None:
                total = landing[landed : landed + high - low].copy_(total, non_blocking=True)
                landed += high - low
            start = bucket.slice_base + low - rank * bucket.region.slice_numel
            flight.sums.append((total, slice(start, start + high - low)))


def _slot(numel: int, device: torch.device, landing: int, *, ends: bool) -> _Slot:
    """``landing``: the ranks that a slice's copy is divided by; 0: gradients are not copied to the host."""
    sent, received = torch.empty(numel, device=device), torch.empty(numel, device=device)
    return _Slot(sent, received, ends, torch.empty(numel // landing, pin_memory=True) if landing else None)


def _placed(layout: UnitLayout) -> Iterator[tuple[int, tuple[int, Span]]]:
    """For each gathered parameter: the offset of its gradient in the group's flat gradients, and its span."""
    base = 0
    for region in layout.regions:
        if region.gathered is Gathered.NO:
            continue
        for span in region.spans:
            yield span.index, (base + span.offset, span)
        base += region.padded_numel
