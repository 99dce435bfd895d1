"""One rank's slices of a parameter group: fp32 weights, moments and gradients; AdamW on them; a record of the store.

They lie in page-aligned host memory, so a commit writes them without a copy; slices on an accelerator are staged through
that memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tierstore._native import Arena, Buffer, HugePages
from tierstore.dense.layout import MOMENT_PLACES, Gathered, UnitLayout, moment_bytes
from tierstore.store.adamw import AdamWConfig
from tierstore.store.core import StoreCore
from tierstore.store.format import SECTION_ALIGNMENT, Group, Placement, RecordSchema, Training
from tierstore.tiers.device import tensor_of

_ARRAYS = ("weight", "exp_avg", "exp_avg_sq")


def schema_name(layout: UnitLayout, training: Training = Training.TRAINED) -> str:
    """The schema of the group's record: groups with slices of one size share it."""
    return f"{'dense' if training is Training.TRAINED else 'frozen'}-{layout.slice_numel}"


def dense_schemas(layouts: Sequence[UnitLayout], training: Training = Training.TRAINED) -> list[RecordSchema]:
    """One schema for each slice size."""
    records = [record for layout in layouts for record, _ in layout.records()]
    sizes = {record.slice_numel: schema_name(record, training) for record in records}
    return [
        RecordSchema(sizes[size], size, placement=Placement.DIRECT, training=training)
        for size in sorted(sizes)
    ]


class UnitSlices:
    """The slices of ``rank`` of one parameter group, on ``home``. Arrays are flat, fp32 [slice_numel]."""

    def __init__(
        self,
        layout: UnitLayout,
        rank: int,
        home: torch.device,
        config: AdamWConfig,
        moments: DiskMoments | None = None,
    ) -> None:
        """``moments``: the store of the moments; None: with the weights."""
        self.layout = layout
        self._moments = moments
        self._rank = rank
        self._config = config
        kept = _ARRAYS if moments is None else _ARRAYS[:1]
        self._records = [_StagedRecord(record, place, kept) for record, place in layout.records()]
        #: ``weight``, and ``exp_avg`` and ``exp_avg_sq`` unless they live on disk: the memory of commits and loads.
        self.host = {a: torch.empty(0) for a in kept}
        if len(self._records) == 1:
            self.host = self._records[0].arrays
        elif self._records:  # pages of several cannot follow one another without gaps
            self.host = {a: torch.zeros(layout.slice_numel) for a in kept}
        on_host = home.type == "cpu"
        self._own = {a: self.host[a] if on_host else self.host[a].to(home) for a in kept}
        self.weight = self._own["weight"]
        self.gradient = torch.zeros(layout.slice_numel, device=home)
        self._steps = torch.zeros((), device=home)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and gradients, and of moments kept with them."""
        return self.layout.slice_numel * 4 * (1 + len(self._own))

    def fill(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copies this rank's part of ``parameters``, which are whole, except divided tables, which are this rank's rows."""
        for region, kept in self.layout.slices():
            if region.gathered is Gathered.NO:
                self.weight[kept].copy_(parameters[region.spans[0].index].detach().reshape(-1))
        for region, span, own, part in self.layout.parts(self._rank):
            if region.gathered is Gathered.YES:
                self.weight[own].copy_(parameters[span.index].detach().reshape(-1)[part])

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Adds the gradient of a parameter that this rank has completely: its rows of a table, or, on a single rank, any
        parameter.
        """
        for region, kept in self.layout.slices():
            for span in region.spans:
                if span.index == index:
                    start = kept.start + span.offset
                    own = self.gradient[start : start + gradient.numel()]
                    own.view(gradient.shape).add_(gradient)

    def norm(self) -> torch.Tensor:
        """The norm of the gradient, in double precision."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.gradient, dtype=torch.float64)
        return norm

    def sum_of_squares_in(self, indices: Container[int]) -> tuple[float, float]:
        """The same for the parameters in ``indices``, and for the others."""
        inside = outside = 0.0
        for _, span, own, _ in self.layout.parts(self._rank):
            square = float(torch.linalg.vector_norm(self.gradient[own], dtype=torch.float64)) ** 2
            if span.index in indices:
                inside += square
            else:
                outside += square
        return inside, outside

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One AdamW step with torch's fused kernel.

        Called without ``torch.optim``, whose classes import the whole compiler: 80 MiB and a second.
        """
        self._steps += 1
        if self.layout.empty:
            return
        if self._moments is None:
            self._adamw(lr, self._own["exp_avg"], self._own["exp_avg_sq"])
            return
        with self._moments.borrow(self.layout, int(self._steps)) as (exp_avg, exp_avg_sq):
            self._adamw(lr, exp_avg, exp_avg_sq)

    def _adamw(self, lr: float, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        torch._fused_adamw_(
            [self.weight],
            [self.gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [self._steps],
            lr=lr,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            weight_decay=self._config.weight_decay,
            eps=self._config.eps,
            amsgrad=False,
            maximize=False,
        )

    # Records ------------------------------------------------------------------------------------------------

    def save(self, store: StoreCore, step: int) -> None:
        """Queues the write of its records; the slices must not change until the commit has returned."""
        if self.layout.empty:
            return
        for name, own in self._own.items():
            if own is not self.host[name]:
                self.host[name].copy_(own)
        if self._moments is not None:
            self._moments.ensure(self.layout, step)
        for record in self._records:
            record.stage(self.host)
            store.write_through(record.layout.key, record.groups(), step=step)

    def load(self, store: StoreCore, step: int, *, fresh: Collection[str] = ()) -> None:
        """Reads the records as of the last commit, which had ``step`` optimizer steps; slices of the keys ``fresh`` have
        none, and do not change.
        """
        for record in self._records:
            if record.layout.key not in fresh:
                store.read_through(record.layout.key, record.groups())
                record.take(self.host)
        self.loaded(step)

    def loaded(self, step: int) -> None:
        """Called when the arrays of ``host`` have been filled with the state after ``step`` optimizer steps."""
        for name, own in self._own.items():
            if own is not self.host[name]:
                own.copy_(self.host[name])
        self._steps.fill_(float(step))


class _StagedRecord:
    """Page-aligned memory of one record's sections: ``layout``'s slices, at offset ``place`` among the group's."""

    def __init__(self, layout: UnitLayout, place: slice, kept: Sequence[str]) -> None:
        self.layout = layout
        self._place = place
        nbytes = layout.slice_numel * 4
        size = -(-nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        arena = Arena(size * len(kept), HugePages.AUTO)
        self._buffers = {a: Buffer(arena, [(i * size, size)], nbytes) for i, a in enumerate(kept)}
        self.arrays = {a: tensor_of(self._buffers[a], torch.float32) for a in kept}

    def stage(self, unit: Mapping[str, torch.Tensor]) -> None:
        """Copies the record's part from ``unit``, unless they share memory."""
        for name, own in self.arrays.items():
            if own is not unit[name]:
                own.copy_(unit[name][self._place])

    def take(self, unit: Mapping[str, torch.Tensor]) -> None:
        """Copies the record's part back to ``unit``."""
        for name, own in self.arrays.items():
            if own is not unit[name]:
                unit[name][self._place].copy_(own)

    def groups(self) -> dict[Group, list[Buffer]]:
        groups = {Group.WEIGHTS: [self._buffers["weight"]]}
        if len(self._buffers) > 1:
            groups[Group.MOMENTS] = [self._buffers["exp_avg"], self._buffers["exp_avg_sq"]]
        return groups


# Moments on disk --------------------------------------------------------------------------------------------
#
# They pass through memory one group at a time. A step reads a group's moments, steps it, and queues their write; there
# are two staging buffers, so that one is written while the next group is read and stepped. Between commits moments are
# overwritten only in slots to which no commit refers, so the last commit stays durable.


@dataclass(slots=True)
class _Place:
    """A staging buffer for two arrays of the largest slices, at ``offset`` of the arena; ``writes`` are in flight from
    it."""

    offset: int
    writes: list[int] = field(default_factory=list)


class DiskMoments:
    """The moments of all parameter groups of a rank, of slices of at most ``largest`` elements."""

    def __init__(self, largest: int) -> None:
        self.nbytes = moment_bytes(largest)
        self._size = self.nbytes // (2 * MOMENT_PLACES)
        self._arena = Arena(self.nbytes, HugePages.AUTO)
        self._places = deque(_Place(i * 2 * self._size) for i in range(MOMENT_PLACES))
        self._store: StoreCore | None = None
        self._written: set[str] = set()

    def attach(self, store: StoreCore, *, written: set[str]) -> None:
        """Sets the ``store`` of the records; those of the keys ``written`` have moments there, the others zeros."""
        self._store = store
        self._written = written

    @contextlib.contextmanager
    def borrow(self, layout: UnitLayout, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Lends ``exp_avg`` and ``exp_avg_sq`` of a group for changes in the block; then queues their write, as of ``step``.

        Waits for the read. Raises RuntimeError without a store, ChecksumError, OSError.
        """
        if self._store is None:
            raise RuntimeError("dense.optimizer_state = nvme: the slices have no records yet")
        place = self._places.popleft()
        try:
            self._store.wait(place.writes)
            buffers = [
                Buffer(self._arena, [(place.offset + i * self._size, self._size)], layout.slice_numel * 4)
                for i in range(2)
            ]
            exp_avg, exp_avg_sq = (tensor_of(buffer, torch.float32) for buffer in buffers)
            if layout.key in self._written:
                self._store.read_through(layout.key, {Group.MOMENTS: buffers})
            else:
                exp_avg.zero_()
                exp_avg_sq.zero_()
            yield exp_avg, exp_avg_sq
            place.writes = self._store.write_through(layout.key, {Group.MOMENTS: buffers}, step=step)
            self._written.add(layout.key)
        finally:
            self._places.append(place)

    def ensure(self, layout: UnitLayout, step: int) -> None:
        """Gives a group that was never stepped its moments before a commit."""
        if layout.key not in self._written:
            with self.borrow(layout, step):
                pass
