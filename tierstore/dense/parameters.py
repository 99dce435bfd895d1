"""ZeRO-3 dense parameters (SE-MoE section 2.2; Rajbhandari et al. 2020): each rank keeps 1/N of every parameter group.

::

    layouts = unit_layouts(units, ranks=group.size, narrow=model.cast_parameters())
    dense = DenseSlices(units, layouts, group=group, device=device, adamw=adamw, config=config)
    gates = dense.attach(model, listener)  # gathers and releases groups as their passes begin and end
    for each step:
        dense.zero_grad()
        for each micro-batch:
            dense.begin_micro()
            model.run(batch).objective.backward()
            dense.end_micro()
        norm = math.sqrt(sum(dense.squares()))
        dense.step(lr)

Gradients are sums over ranks, not means: for a mean, divide the objective. With one rank (fp32, slices on the device)
nothing is gathered or copied: parameters are always views of the slices.

The bits of a step do not depend on fusion, on the number and size of buffers and buckets, on resharding, on the type in
which weights are sent or on the location of the optimizer state (on CPUs; an accelerator's AdamW kernel rounds
differently).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tierstore._native import Arena, Buffer, HugePages
from tierstore.accelerator import read
from tierstore.cache.access import Phase
from tierstore.dense.buckets import GradientExchange
from tierstore.dense.config import DenseConfig, GatherDtype, OptimizerState, Reshard
from tierstore.dense.fusion import DenseMessages, FusionBuffer, FusionPool, GatheredUnit, saved_by_place
from tierstore.dense.gates import Gates, PassListener
from tierstore.dense.layout import DenseBytes, UnitLayout, blocks_held, needs_exchange, needs_gather
from tierstore.dense.slices import DiskMoments, UnitSlices, schema_name
from tierstore.errors import StoreError
from tierstore.model.interface import DenseModel
from tierstore.parallel import RankGroup
from tierstore.store.adamw import AdamWConfig
from tierstore.store.core import StoreCore
from tierstore.store.format import SECTION_ALIGNMENT, Group
from tierstore.store.registering import NewRecord, register_many
from tierstore.tiers.device import tensor_of
from tierstore.timeline import TimelineSink

Units = Sequence[tuple[str, Sequence[nn.Parameter]]]


@dataclass(frozen=True, slots=True)
class DividedParameters:
    """The parameters divided over the ranks of ``group``: ``indices[u]`` of parameter group u. The others are the same on
    all of its ranks.
    """

    group: RankGroup
    indices: tuple[frozenset[int], ...]


class DenseSlices:
    """Owns the parameters of ``units``: embedding, blocks, head, in the order of their forward passes.

    Every rank constructs it with the same values, cut by ``layouts``; from then on a parameter is whole only while its
    group is gathered. The parameter of a divided table is always this rank's rows. ``gather``, ``use`` and ``release``
    are for the queue that drives groups by number. One thread.
    """

    def __init__(
        self,
        units: Units,
        layouts: Sequence[UnitLayout],
        *,
        group: RankGroup,
        device: torch.device,
        adamw: AdamWConfig,
        config: DenseConfig,
        compute: torch.dtype = torch.float32,
        timeline: TimelineSink | None = None,
        divided: DividedParameters | None = None,
    ) -> None:
        """``compute``: the type in which narrow regions are gathered, unless ``config.gather`` is fp32. ``divided``: the
        parameters that are parts of larger ones; None if all are whole.

        ``timeline`` shows gathers and reductions.
        """
        self.layouts = tuple(layouts)
        self._messages = DenseMessages(timeline)
        self.traffic = self._messages.traffic
        self._group = group
        self._device = device
        self._divided = divided
        self._narrow = compute if config.gather is GatherDtype.COMPUTE else torch.float32
        home = device if config.optimizer_state is OptimizerState.DEVICE else torch.device("cpu")
        self._moments: DiskMoments | None = None
        largest = max(layout.slice_numel for layout in self.layouts)
        if config.optimizer_state is OptimizerState.NVME and largest:
            self._moments = DiskMoments(largest)
        self.slices = [UnitSlices(layout, group.rank, home, adamw, self._moments) for layout in self.layouts]
        self._pool: FusionPool | None = None
        if needs_gather(self.layouts, config, group.size, self._narrow):
            self._pool = FusionPool(
                self.layouts,
                device,
                narrow=self._narrow,
                blocks=blocks_held(self.layouts, config),
                ranks=group.size,
                on_host=home.type == "cpu",
            )
        self._parameters = [list(parameters) for _, parameters in units]
        self._units: list[GatheredUnit] = []
        for number, (own, parameters) in enumerate(zip(self.slices, self._parameters, strict=True)):
            own.fill(parameters)
            self._units.append(
                GatheredUnit(number, own, parameters, group, self._pool, self._narrow, device, self._messages)
            )
            for parameter in parameters:
                parameter.grad = None
        self._exchange: GradientExchange | None = None
        if needs_exchange(config, group.size):
            self._exchange = GradientExchange(
                self.slices,
                group,
                device,
                bucket_bytes=config.bucket_bytes,
                buffers=config.gradient_buffers,
                messages=self._messages,
            )
        self._gates: Gates | None = None

    def attach(self, model: DenseModel, listener: PassListener) -> Gates:
        """Hooks the parameter groups of ``model``, reporting to ``listener``, until ``detach``."""
        saving: Callable[[], AbstractContextManager[Any]] = nullcontext
        if self._pool is not None:
            saving = partial(saved_by_place, self._pool, self._present)
        self._gates = Gates(
            model, self._parameters, listener, arrive=self._arrive, flush=self._flush, saving=saving
        )
        return self._gates

    def detach(self) -> None:
        """Removes the hooks. Without it the slices' memory is freed only when Python next collects reference cycles."""
        if self._gates is not None:
            self._gates.remove()
            self._gates = None

    @property
    def nbytes(self) -> DenseBytes:
        """The bytes allocated for the lifetime of this object."""
        return DenseBytes(
            slices=sum(unit.nbytes for unit in self.slices)
            + (self._moments.nbytes if self._moments is not None else 0),
            fusion=self._pool.nbytes if self._pool is not None else 0,
            gradients=self._exchange.nbytes if self._exchange is not None else 0,
            staging=sum(each.staging for each in (self._pool, self._exchange) if each is not None),
        )

    # Gathering ----------------------------------------------------------------------------------------------

    def gather(self, unit: int) -> None:
        """Issues the gather of a group that is not gathered. A collective. Raises BudgetError if no buffer is free."""
        self._units[unit].gather()

    def use(self, unit: int) -> None:
        """Waits for the gather: then the group's parameters are whole. Raises RuntimeError if none was issued, PeerError."""
        self._units[unit].use()

    def release(self, unit: int) -> None:
        """Releases the group's parameters until its next gather.

        The first and the last group stay in buffers of their own until they are stepped: their next gather costs nothing,
        and a tied head finds the embedding.
        """
        self._units[unit].release()

    def whole(self, unit: int) -> list[Tensor]:
        """Copies of the group's parameters, fp32, on the CPU. A collective."""
        layout, slices = self.layouts[unit], self.slices[unit]
        found: dict[int, Tensor] = {}
        for region, kept in layout.slices():
            flat = torch.empty(region.padded_numel, device=self._device)
            self._group.all_gather(flat, slices.weight[kept].to(flat.device)).wait()
            for span in region.spans:
                part = flat[span.offset : span.offset + span.numel]
                found[span.index] = part.view(span.shape).to("cpu", copy=True)
        return [found[index] for index in range(len(found))]

    def _present(self, unit: int) -> FusionBuffer:
        gathered = self._units[unit]
        if not gathered.whole and self._gates is not None:
            self._gates.begin_backward(unit)
        if not gathered.whole or gathered.buffer is None:
            raise RuntimeError(f"{self.layouts[unit].name} is read after its backward pass")
        return gathered.buffer

    # Gradients ----------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Zeroes the gradients. Call it before the first micro-batch of a step."""
        if self._exchange is not None:
            self._exchange.finish()
        for unit in self.slices:
            unit.gradient.zero_()

    def begin_micro(self) -> None:
        """Prepares for a forward and a backward pass. Raises RuntimeError if the last one was left in the middle."""
        if self._exchange is not None:
            self._exchange.begin()

    def resume_micro(self) -> None:
        """Prepares for the backward pass of an earlier forward pass, for interleaved micro-batches."""
        if self._gates is not None:
            self._gates.resume()
        self.begin_micro()

    def end_micro(self) -> None:
        """Called when the backward pass has returned. A collective; gradients may still be in flight."""
        if self._gates is not None:
            self._gates.close()
        self._flush(0)

    @contextmanager
    def micro_batch(self, unit: int) -> Iterator[Callable[[int, Tensor], None]]:
        """For layer order: takes the gradients of ``unit`` from one micro-batch. Yields a function (index, gradient) to
        pass each to; missing ones are zero. A collective at the end.
        """
        if self._exchange is not None:
            self._exchange.again(unit)
        yield partial(self._arrive, unit)
        self._flush(unit)

    def finish(self, unit: int | None = None) -> None:
        """Waits until the gradients of ``unit`` (None: of all groups) are summed over ranks and added up."""
        if self._exchange is not None:
            self._exchange.finish(unit)

    def _arrive(self, unit: int, index: int, gradient: Tensor) -> None:
        if self._exchange is not None and not self.layouts[unit].divided(index):
            self._exchange.arrive(unit, index, gradient)
        else:
            self.slices[unit].add_gradient(index, gradient)

    def _flush(self, unit: int) -> None:
        if self._exchange is not None:
            self._exchange.flush(unit)

    def squares(self) -> list[float]:
        """The sums of squares of each group's gradients over all ranks, in double precision: the same bits on every rank.
        A collective.

        Not finite where any gradient of any rank is not.
        """
        self.finish()
        if self._divided is None:
            (norms,) = read(torch.stack([unit.norm() for unit in self.slices]))
            squares = torch.tensor([norm**2 for norm in norms.tolist()], dtype=torch.float64)
            self._group.all_reduce(squares).wait()
        else:
            own = [
                unit.sum_of_squares_in(indices)
                for unit, indices in zip(self.slices, self._divided.indices, strict=True)
            ]
            both = torch.tensor(own, dtype=torch.float64)
            self._group.all_reduce(both).wait()
            squares = both[:, 0].contiguous()
            self._divided.group.all_reduce(squares).wait()
            squares += both[:, 1]
        found: list[float] = squares.tolist()
        return found

    def scale_gradients(self, scale: float) -> None:
        for unit in self.slices:
            unit.gradient.mul_(scale)

    def step(self, lr: float) -> None:
        """One AdamW step of every parameter group."""
        for unit in range(len(self.slices)):
            self.step_unit(unit, lr)

    def step_unit(self, unit: int, lr: float) -> None:
        """One AdamW step of one group, whose parameters must be gathered again before use.

        Raises RuntimeError if they are held for a later pass, which would see the old values.
        """
        self.finish(unit)
        self._stale(unit)
        self.slices[unit].step(lr)

    def _stale(self, unit: int) -> None:
        gathered = self._units[unit]
        if self._pool is None:
            return
        if self._pool.owns(unit):
            gathered.free()
        elif gathered.held:
            raise RuntimeError(f"{self.layouts[unit].name} is stepped while it is gathered")

    # Records ------------------------------------------------------------------------------------------------

    @property
    def _kept(self) -> list[UnitLayout]:
        """The content of each record."""
        return [record for layout in self.layouts for record, _ in layout.records()]

    def record_counts(self, keys: Collection[str] | None = None) -> dict[str, int]:
        """The number of records by schema, of ``keys`` (None: all)."""
        return dict(
            Counter(schema_name(layout) for layout in self._kept if keys is None or layout.key in keys)
        )

    def missing(self, store: StoreCore) -> list[str]:
        """The keys without a record in ``store``."""
        return [layout.key for layout in self._kept if layout.key not in store.records]

    def register(self, store: StoreCore, keys: Collection[str] | None = None) -> None:
        """Adds the records (of ``keys``, if given) to ``store``. Required before a commit, and before a step with NVME."""
        wanted = [layout for layout in self._kept if keys is None or layout.key in keys]
        register_many(store, [NewRecord(layout.key, schema_name(layout)) for layout in wanted])
        if self._moments is not None:
            self._moments.attach(store, written=set())

    def save(self, store: StoreCore, step: int) -> None:
        """Queues the write of this rank's slices, which must not change until the commit has returned."""
        for unit in self.slices:
            unit.save(store, step)

    def load(self, store: StoreCore, step: int, *, fresh: Collection[str] = ()) -> None:
        """Reads this rank's slices as of the last commit, which had ``step`` optimizer steps. Slices of the keys
        ``fresh`` keep their first values.
        """
        for number, unit in enumerate(self.slices):
            self._stale(number)
            unit.load(store, step, fresh=fresh)
        if self._moments is not None:
            self._moments.attach(store, written={layout.key for layout in self._kept})


# Frozen dense parameters: whole on every rank, read once from the records of their slices -------------------


def load_frozen(
    store: StoreCore,
    units: Sequence[tuple[str, Sequence[nn.Parameter]]],
    layouts: Sequence[UnitLayout],
    *,
    group: RankGroup,
    device: torch.device,
    narrow: Collection[nn.Parameter] = (),
    compute: torch.dtype = torch.float32,
) -> None:
    """Loads the parameters of ``units`` from the last commit into memory of their own on ``device``, in their own types;
    each rank's store has its slices, laid out by ``layouts``. They get no gradients. A collective.

    Those of ``narrow`` become ``compute``: the model casts them before their only use. Temporary memory is one group in
    fp32 (on several ranks also its slice). Raises StoreError for a missing record, ChecksumError, OSError.
    """
    cast = {id(parameter) for parameter in narrow}
    for (_, parameters), layout in zip(units, layouts, strict=True):
        if layout.empty:
            continue
        if layout.key not in store.records:
            raise StoreError(f"{store.directory}: record {layout.key!r} is missing")
        nbytes = layout.slice_numel * 4
        size = -(-nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        buffer = Buffer(Arena(size, HugePages.OFF), [(0, size)], nbytes)
        store.read_through(layout.key, {Group.WEIGHTS: [buffer]})
        slices = tensor_of(buffer, torch.float32)
        for region, kept in layout.slices():
            whole: Tensor = slices[kept]
            if group.size > 1:
                whole = torch.empty(region.padded_numel)
                group.all_gather(whole, slices[kept]).wait()
            for span in region.spans:
                parameter = parameters[span.index]
                values = whole[span.offset : span.offset + span.numel].view(span.shape)
                dtype = compute if id(parameter) in cast else parameter.dtype
                parameter.data = values.to(device=device, dtype=dtype, copy=True)
                parameter.requires_grad_(False)


class GatherOnDemand:
    """A listener without lookahead: gathers a group when its pass begins, and releases it when the pass ends. With
    ``Reshard.AFTER_BACKWARD`` blocks stay gathered from their forward to their backward pass.
    """

    def __init__(self, dense: DenseSlices, reshard: Reshard) -> None:
        self._dense = dense
        self._reshard = reshard

    def enter(self, unit: int, phase: Phase) -> None:
        self._dense.gather(unit)
        self._dense.use(unit)

    def leave(self, unit: int, phase: Phase) -> None:
        stays = phase is Phase.FORWARD and torch.is_grad_enabled()
        if not (stays and self._reshard is Reshard.AFTER_BACKWARD):
            self._dense.release(unit)
