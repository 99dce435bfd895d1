"""Fusion buffers: a parameter group's slices are gathered into one, and its parameters are views of it meanwhile.

All are allocated at the start. Blocks share a pool of equal buffers, each as large as the largest block; the first and
the last group (embedding and head) have one each. So the peak does not depend on the number of blocks, and a schedule
that needs more blocks at once than there are buffers is an error, not more memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from tierstore.accelerator import following, has_own_memory, pinned_bytes, reached
from tierstore.dense.layout import Gathered, Narrow, Region, UnitLayout, gather_copies
from tierstore.dense.slices import UnitSlices
from tierstore.errors import BudgetError
from tierstore.parallel import RankGroup, Work
from tierstore.timeline import NullTimeline, TimelineSink, Track


class FusionBuffer:
    """``nbytes`` of device memory for gathering one parameter group at a time. Slices on the host are copied to an
    accelerator through ``staging`` bytes of pinned memory.
    """

    def __init__(self, nbytes: int, device: torch.device, *, scratch: int, staging: int = 0) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        #: Memory that the process group's gather needs beside its result.
        self.scratch = torch.empty(scratch, dtype=torch.uint8, device=device)
        self.unit: int | None = None
        self._staging = torch.empty(staging, dtype=torch.uint8, pin_memory=True) if staging else None
        self._copied: torch.Event | None = None

    @contextlib.contextmanager
    def filling(self, stream: torch.Stream | None) -> Iterator[None]:
        """The context of ``copy``, and of the gather that follows, which are on ``stream``."""
        if stream is None:
            yield
            return
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()  # the last copy still reads the staging memory
        with following(stream):
            yield
            self._copied = reached(stream.device)

    def copy(self, source: torch.Tensor, own: torch.Tensor, offset: int) -> None:
        """Copies a slice to its place ``own``, through the staging memory from ``offset`` on."""
        if self._staging is not None:
            staged = self._staging[offset : offset + own.nbytes].view(own.dtype)
            source = staged.copy_(source)
        own.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Makes the current stream wait for the copies."""
        if self._copied is not None:
            torch.accelerator.current_stream(self.memory.device).wait_event(self._copied)

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.memory.numel() + self.scratch.numel()

    @property
    def staging(self) -> int:
        """Bytes of pinned host memory."""
        return 0 if self._staging is None else pinned_bytes(self._staging.nbytes)


class FusionPool:
    """The buffers of ``layouts``; ``blocks`` of them are shared by all parameter groups but the first and the last."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        device: torch.device,
        *,
        narrow: torch.dtype,
        blocks: int,
        ranks: int,
        on_host: bool = False,
    ) -> None:
        """``on_host``: the slices are not on ``device``."""
        copies = gather_copies(ranks, device.type)
        staged = on_host and has_own_memory(device)
        #: The stream of the slices' copies and their gathers; None: the current one.
        self.uploads = torch.Stream(device) if staged else None

        def make(nbytes: int) -> FusionBuffer:
            return FusionBuffer(
                nbytes, device, scratch=nbytes if copies else 0, staging=nbytes // ranks if staged else 0
            )

        sizes = [layout.gathered_bytes(narrow) for layout in layouts]
        ends = {0, len(layouts) - 1}
        between = [size for unit, size in enumerate(sizes) if unit not in ends]
        self._own = {unit: make(sizes[unit]) for unit in sorted(ends)}
        self._shared = [make(max(between)) for _ in range(blocks)]
        self._free = list(reversed(self._shared))
        # Buffers of groups without trained parameters have no memory, and all the same address.
        held = [buffer for buffer in (*self._own.values(), *self._shared) if buffer.nbytes]
        self._by_address = {buffer.address: buffer for buffer in held}
        self._names = [layout.name for layout in layouts]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._by_address.values())

    @property
    def staging(self) -> int:
        """Bytes of pinned host memory."""
        return sum(buffer.staging for buffer in self._by_address.values())

    def owns(self, unit: int) -> bool:
        """Whether parameter group ``unit`` has a buffer of its own."""
        return unit in self._own

    def allocate(self, unit: int) -> FusionBuffer:
        """A buffer for ``unit``. Raises BudgetError if all are in use."""
        if unit in self._own:
            buffer = self._own[unit]
        elif self._free:
            buffer = self._free.pop()
        else:
            count = len(self._shared)
            held = ", ".join(self._names[b.unit] for b in self._shared if b.unit is not None)
            raise BudgetError(
                f"dense.buffers: {self._names[unit]} is needed while all {count} fusion buffers are in use "
                f"({held}); at least {count + 1} are needed"
            )
        buffer.unit = unit
        return buffer

    def free(self, buffer: FusionBuffer) -> None:
        assert buffer.unit is not None
        if buffer.unit not in self._own:
            self._free.append(buffer)
        buffer.unit = None

    def find(self, address: int) -> FusionBuffer | None:
        """The buffer whose memory starts at ``address``."""
        return self._by_address.get(address)


class _State(Enum):
    SLICED = "sliced"
    GATHERING = "gathering"
    WHOLE = "whole"


def _gathered_dtype(region: Region, narrow: torch.dtype) -> torch.dtype:
    return narrow if region.narrow is Narrow.YES else torch.float32


class GatheredUnit:
    """The parameters of one group: whole between ``use`` and ``release``, NaN otherwise; except divided tables, which are
    always this rank's rows, in its slices.

    ``slices`` may be on another device than the parameters' ``device``. Without a pool (one rank, slices on the device,
    no narrowing) parameters are always views of the slices themselves.
    """

    def __init__(
        self,
        number: int,
        slices: UnitSlices,
        parameters: Sequence[nn.Parameter],
        group: RankGroup,
        pool: FusionPool | None,
        narrow: torch.dtype,
        device: torch.device,
        messages: DenseMessages,
    ) -> None:
        self._device = device
        self.number = number
        self.slices = slices
        self._parameters = parameters
        self._group = group
        self._pool = pool
        self._narrow = narrow
        self._messages = messages
        self._state = _State.SLICED
        self._works: list[Work] = []
        self.buffer: FusionBuffer | None = None
        self._gathered = [each for each in slices.layout.slices() if each[0].gathered is Gathered.YES]
        for region, kept in slices.layout.slices():
            if region.gathered is Gathered.NO:
                own = slices.weight[kept].view(-1, region.table.width)
                parameters[region.spans[0].index].data = own
        if pool is None:
            self._state = _State.WHOLE
            for region, kept in self._gathered:
                for span in region.spans:
                    part = slice(kept.start + span.offset, kept.start + span.offset + span.numel)
                    parameters[span.index].data = slices.weight[part].view(span.shape)
        else:
            self._put_away()

    @property
    def whole(self) -> bool:
        return self._state is _State.WHOLE

    @property
    def held(self) -> bool:
        """Whether it is gathered, or being gathered."""
        return self._state is not _State.SLICED

    def gather(self) -> None:
        """Issues the gather, without waiting for it; a no-op if it is gathered. Raises BudgetError."""
        if self.held:
            return
        assert self._pool is not None
        buffer = self.buffer = self._pool.allocate(self.number)
        ranks, offset = self._group.size, 0
        with buffer.filling(self._pool.uploads):
            for region, kept in self._gathered:
                dtype = _gathered_dtype(region, self._narrow)
                nbytes = region.padded_numel * dtype.itemsize
                part = slice(offset, offset + nbytes)
                out = buffer.memory[part].view(dtype)
                scratch = buffer.scratch[part].view(dtype) if buffer.scratch.numel() else None
                begin = self._group.rank * region.slice_numel
                own = out[begin : begin + region.slice_numel]
                buffer.copy(self.slices.weight[kept], own, offset // ranks)
                work = self._group.all_gather(out, own, scratch=scratch)
                self._works.append(work)
                if ranks > 1:
                    self._messages.gathered(work, self.slices.layout.name, own.nbytes * (ranks - 1))
                offset += nbytes
        self._state = _State.GATHERING

    def use(self) -> None:
        """Waits for the gather: then the parameters are whole. Raises RuntimeError if none was issued."""
        if self._state is _State.WHOLE:
            return
        if self._state is _State.SLICED:
            raise RuntimeError(f"{self.slices.layout.name} is used before it is gathered")
        for work in self._works:
            work.wait()
        self._works.clear()
        assert self.buffer is not None
        self.buffer.wait()
        offset = 0
        for region, _ in self._gathered:
            dtype = _gathered_dtype(region, self._narrow)
            nbytes = region.padded_numel * dtype.itemsize
            flat = self.buffer.memory[offset : offset + nbytes].view(dtype)
            for span in region.spans:
                view = flat[span.offset : span.offset + span.numel].view(span.shape)
                self._parameters[span.index].data = view
            offset += nbytes
        self._state = _State.WHOLE

    def release(self) -> None:
        """Releases the parameters until the next ``gather``.

        A group with a buffer of its own keeps them there until its slices change (``free``): the next gather costs nothing.
        """
        if self._pool is not None and not self._pool.owns(self.number):
            self.free()

    def free(self) -> None:
        """Frees the buffer, if there is one."""
        if self.buffer is None or self._pool is None:
            return
        for work in self._works:  # a buffer with messages in flight cannot be reused
            work.wait()
        self._works.clear()
        self.buffer.wait()
        self._put_away()
        self._pool.free(self.buffer)
        self.buffer = None
        self._state = _State.SLICED

    def _put_away(self) -> None:
        """Replaces parameters by NaN of their shape, without memory, so that use without a gather is noticed."""
        for region, _ in self._gathered:
            dtype = _gathered_dtype(region, self._narrow)
            nothing = torch.full((), float("nan"), dtype=dtype, device=self._device)
            for span in region.spans:
                self._parameters[span.index].data = nothing.expand(span.shape)


# Tensors that autograd saves --------------------------------------------------------------------------------
#
# They must not point into a buffer that another group will be gathered into. In the context of ``saved_by_place``, a
# tensor that autograd saves and whose memory lies in a fusion buffer (a parameter, a transposed view of one) is saved as
# its offset in the group, and restored as a view of the buffer that then holds the group.


@dataclass(frozen=True, slots=True)
class _Saved:
    """A view of a gathered group: ``offset`` and ``strides`` in elements of ``dtype``."""

    unit: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def saved_by_place(
    pool: FusionPool, present: Callable[[int], FusionBuffer]
) -> torch.autograd.graph.saved_tensors_hooks:
    """A context. ``present(unit)`` returns the buffer in which the group is whole, gathering it if necessary."""

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if not tensor.numel():
            return tensor
        buffer = pool.find(tensor.untyped_storage().data_ptr())
        if buffer is None or buffer.unit is None:
            return tensor
        return _Saved(
            buffer.unit, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        )

    def unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        flat = present(saved.unit).memory.view(saved.dtype)
        return flat.as_strided(saved.shape, saved.strides, saved.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# The messages of dense slices, counted and drawn on a timeline ----------------------------------------------


@dataclass(slots=True)
class DenseTraffic:
    """Collectives issued, and bytes that this rank sent to others in them."""

    gathers: int = 0
    gather_bytes: int = 0
    reductions: int = 0
    reduction_bytes: int = 0


class DenseMessages:
    """Counts each collective that sends something. The ``timeline`` shows it from its issue to the end of the wait for
    it, and omits those not waited for yet.
    """

    def __init__(self, timeline: TimelineSink | None = None) -> None:
        self.traffic = DenseTraffic()
        self._timeline = timeline or NullTimeline()

    def gathered(self, work: Work, unit: str, sent_bytes: int) -> None:
        """A gather of ``unit`` was issued, in which this rank sends ``sent_bytes`` to others."""
        self.traffic.gathers += 1
        self.traffic.gather_bytes += sent_bytes
        self._draw(work, Track.GATHERS, f"gather {unit}", sent_bytes)

    def reduced(self, work: Work, unit: str, sent_bytes: int) -> None:
        """The same for a reduction of gradients."""
        self.traffic.reductions += 1
        self.traffic.reduction_bytes += sent_bytes
        self._draw(work, Track.REDUCTIONS, f"scatter {unit}", sent_bytes)

    def _draw(self, work: Work, track: Track, name: str, sent_bytes: int) -> None:
        if self._timeline.enabled:
            issued, args = self._timeline.now(), {"sent_bytes": sent_bytes}
            work.observe(lambda: self._timeline.add(track, name, issued, self._timeline.now(), args))
