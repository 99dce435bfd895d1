"""The explicit sequence of layer passes, and the work of two independent queues around each pass (SE-MoE section 2.2, the
parallel block of Algorithm 1).

A step consists, for each micro-batch, of forward passes over the *units* 0 .. U-1 (groups of dense parameters that are
gathered together: embedding, layers, head) and backward passes U-1 .. 0, followed by optimizer passes. The **horizontal**
queue gathers the parameters of a unit before its pass and scatters its gradients after it; the **vertical** queue moves
experts disk -> host -> device and back. Each has a lookahead in passes and a budget in bytes.

What a queue does, and when, depends only on the sequence, never on what has completed. So all ranks issue their collectives
in the same order, however fast their disks are, and the same object can be printed (``str``), executed
(``HorizontalQueue``, ``TieredExperts``) and simulated (``operations``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from tierstore.cache.access import Phase
from tierstore.config import check_least
from tierstore.dense.config import DenseConfig, Reshard
from tierstore.dense.layout import UnitLayout, blocks_held, gather_width
from tierstore.errors import ConfigError
from tierstore.model.config import ComputeDtype
from tierstore.prefetch.plan import PrefetchConfig, StepTiming
from tierstore.tiers.slots import ElementType

#: The column titles of ``Schedule.rows``.
COLUMNS = ("", "pass", "gathers before", "releases after", "scatters after", "fetches meanwhile")


class GatherBuffer(Enum):
    """The buffer that holds a unit's gathered parameters."""

    SHARED = "shared"  # each release drops the parameters
    OWN = "own"  # parameters stay until the unit is stepped: only its first gather of a step sends a message


@dataclass(frozen=True, slots=True)
class Unit:
    """Dense parameters that are gathered together, and the MoE layer among them, if any.

    ``gathered``: bytes that they occupy while gathered (the whole buffer, if it has a fixed size). ``layer``: the layer that
    waiting for them is charged to; default: ``moe_layer``.
    """

    name: str
    gathered: int = 0
    moe_layer: int | None = None
    layer: int | None = None
    buffer: GatherBuffer = GatherBuffer.SHARED


class StickyGathers:
    """Tracks which gathers of ``units`` send a message. A unit in its own buffer stays gathered: only the first gather
    since its step sends one.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._sent: set[int] = set()

    def sent(self, gathers: Iterable[int]) -> tuple[int, ...]:
        """Record that ``gathers`` are issued; returns those that send a message."""
        sent = tuple(unit for unit in gathers if unit not in self._sent)
        self._sent.update(unit for unit in sent if self._units[unit].buffer is GatherBuffer.OWN)
        return sent

    def step(self, unit: int) -> None:
        """Record that ``unit`` was stepped, so that its gathered parameters are stale."""
        self._sent.discard(unit)


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over one unit. ``micro``: the micro-batch, if their passes interleave.

    ``later``: the number of cycles after the current one. A cycle is a step if the passes of micro-batches interleave;
    otherwise it is one micro-batch, or one forward-only run. In practice 0 (this cycle) or 1 (the next); more only if the
    queue looks ahead further than a whole cycle.
    """

    phase: Phase
    unit: int
    moe_layer: int | None = None
    later: int = 0
    micro: int = 0


@dataclass(frozen=True, slots=True)
class MicroPass:
    """The pass of micro-batch ``micro`` over all units."""

    phase: Phase
    micro: int


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How far a queue looks ahead: ``depth`` passes beyond the current one, ``nbytes`` held at a time (None: no limit)."""

    depth: int = 1
    nbytes: int | None = None

    def __post_init__(self) -> None:
        check_least(self, 0, "depth", "nbytes")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The passes of a step over ``units``, and the limits of the two queues. Immutable.

    With ``StepTiming.IMMEDIATE`` the optimizer pass of a unit comes ``horizontal.depth`` passes after its backward pass,
    so that its gradients have time to be scattered. With ``DEFERRED`` all optimizer passes come last, in forward order, so
    that the first units of the next step can be gathered while the others are stepped.
    ``order``: the passes of a step over all units, if those of several micro-batches interleave, as in a pipeline stage;
    empty if one micro-batch comes after another. Backward passes are in the order of micro-batches.
    With ``Reshard.AFTER_FORWARD`` a unit is released after every pass, unless a pass within the lookahead needs it again;
    with ``AFTER_BACKWARD`` it stays gathered from its forward to its backward pass.
    Raises ConfigError if the units cannot fit the horizontal budget, ValueError for an invalid order.
    """

    units: tuple[Unit, ...]
    horizontal: QueueLimits = QueueLimits()
    vertical: QueueLimits = QueueLimits()
    timing: StepTiming = StepTiming.DEFERRED
    reshard: Reshard = Reshard.AFTER_FORWARD
    micro_batches: int = 1
    order: tuple[MicroPass, ...] = ()
    #: The passes of one step, in program order.
    passes: tuple[Pass, ...] = field(init=False)
    #: The passes of a forward-only run (validation, generation).
    forward_passes: tuple[Pass, ...] = field(init=False)
    _cycle: tuple[Pass, ...] = field(init=False, repr=False)
    _forward_cycle: tuple[Pass, ...] = field(init=False, repr=False)
    #: The results of ``following``, cached because every pass over a layer reads them more than once.
    _following: dict[tuple[Phase, int, int, bool], tuple[Pass, ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_least(self, 1, "micro_batches")
        self._check_budget()
        self._check_order()
        put = object.__setattr__  # the class is frozen; these fields follow from the arguments
        forward = tuple(self._passes(MicroPass(Phase.FORWARD, 0)))
        once = forward + tuple(self._passes(MicroPass(Phase.BACKWARD, 0)))
        cycle = tuple(item for turn in self.order for item in self._passes(turn)) or once
        turns = self.order or (MicroPass(Phase.FORWARD, 0), MicroPass(Phase.BACKWARD, 0))
        *before, last = turns
        ahead = [item for turn in before for item in self._passes(turn)]
        ending = self._with_optimizer(tuple(self._passes(last)))
        put(self, "forward_passes", forward)
        put(self, "passes", (*(() if self.order else once * (self.micro_batches - 1)), *ahead, *ending))
        put(self, "_forward_cycle", tuple(item for item in forward if item.moe_layer is not None))
        put(self, "_cycle", tuple(item for item in cycle if item.moe_layer is not None))
        following = {
            (item.phase, item.moe_layer, item.micro, training): self._ahead(cycle, here)
            for training, cycle in ((True, self._cycle), (False, self._forward_cycle))
            for here, item in enumerate(cycle)
        }
        put(self, "_following", following)

    def _check_order(self) -> None:
        """Check that each micro-batch passes forward, then backward, and that each phase is in micro-batch order."""
        if not self.order:
            return
        wanted = list(range(self.micro_batches))
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            if [turn.micro for turn in self.order if turn.phase is phase] != wanted:
                raise ValueError(f"order: expected {phase.name.lower()} passes of micro-batches {wanted}")
        places = {turn: place for place, turn in enumerate(self.order)}
        for micro in wanted:
            if places[MicroPass(Phase.BACKWARD, micro)] < places[MicroPass(Phase.FORWARD, micro)]:
                raise ValueError(f"order: micro-batch {micro} passes backward before it passes forward")

    @property
    def interleaves(self) -> bool:
        """Whether the passes of several micro-batches interleave, so that ``Pass.micro`` has a meaning."""
        return bool(self.order)

    @classmethod
    def of_layers(cls, layers: Sequence[int], *, depth: int, order: Sequence[MicroPass] = ()) -> Schedule:
        """A schedule of the vertical queue alone: experts of MoE layers ``layers`` (in model order), without gathers.
        ``order``: as in ``Schedule``.
        """
        units = tuple(Unit(f"layer {layer}", 0, layer) for layer in layers)
        return cls(
            units=units,
            vertical=QueueLimits(depth),
            order=tuple(order),
            micro_batches=max(1, len(order) // 2),
        )

    def _check_budget(self) -> None:
        budget = self.horizontal.nbytes
        if budget is None:
            return
        largest = max(self.units, key=lambda unit: unit.gathered)
        if largest.gathered > budget:
            raise ConfigError(
                f"horizontal.nbytes: {budget} bytes cannot hold {largest.name}, which has {largest.gathered}"
            )
        total = sum(unit.gathered for unit in self.units)
        if self.reshard is Reshard.AFTER_BACKWARD and total > budget:
            raise ConfigError(
                f"horizontal.nbytes: {budget} bytes cannot hold all units ({total} bytes), which "
                f"reshard = {self.reshard.value} keeps"
            )

    def _passes(self, turn: MicroPass) -> Iterator[Pass]:
        """Forward passes over the units in order, or backward passes in reverse order."""
        units = range(len(self.units))
        for unit in units if turn.phase is Phase.FORWARD else reversed(units):
            yield Pass(turn.phase, unit, self.units[unit].moe_layer, micro=turn.micro)

    @staticmethod
    def _steps(units: Iterable[int]) -> Iterator[Pass]:
        return (Pass(Phase.OPTIMIZER, unit) for unit in units)

    def _with_optimizer(self, backward: Sequence[Pass]) -> list[Pass]:
        """The backward passes of the last micro-batch with the optimizer passes inserted."""
        if self.timing is StepTiming.DEFERRED:
            return [*backward, *self._steps(range(len(self.units)))]
        placed: list[Pass] = []
        lag, count = self.horizontal.depth, len(self.units)
        for done, item in enumerate(backward):
            placed.append(item)
            if done >= lag:
                placed += self._steps([count - 1 - (done - lag)])
        placed += self._steps(reversed(range(min(lag, count))))
        return placed

    # The vertical queue -------------------------------------------------------------------------------------

    def following(self, phase: Phase, layer: int, *, training: bool, micro: int = 0) -> list[Pass]:
        """The passes of MoE layers that the vertical queue looks ahead to from ``layer``'s ``phase``, nearest first.
        ``micro``: as in ``Pass``.
        """
        return list(self._following[phase, layer, micro, training])

    def _ahead(self, cycle: Sequence[Pass], here: int) -> tuple[Pass, ...]:
        ahead = []
        for position in range(here + 1, here + 1 + self.vertical.depth):
            turn, index = divmod(position, len(cycle))
            item = cycle[index]
            ahead.append(replace(item, later=turn))
        return tuple(ahead)

    def recomputed(self, layer: int, *, micro: int = 0) -> list[Pass]:
        """``following`` for the recomputation of ``layer`` (activation checkpointing): its backward pass comes next."""
        wanted = (Phase.BACKWARD, layer, micro)
        own = next(item for item in self._cycle if (item.phase, item.moe_layer, item.micro) == wanted)
        return [own, *self.following(Phase.BACKWARD, layer, training=True, micro=micro)][
            : self.vertical.depth
        ]

    # Reading ------------------------------------------------------------------------------------------------

    def rows(self, step: int = 1) -> list[tuple[str, ...]]:
        """A table of step ``step``, one row per pass: its number and name; the units whose gathers are issued before it,
        when the previous pass ends; the units released after it; the unit whose gradients are then scattered; the MoE
        passes whose experts are fetched meanwhile. Step 0 starts with nothing gathered. A unit in its own buffer is
        gathered once per step, and released when it is stepped.
        """
        window, sticky = Window(self, training=True), StickyGathers(self.units)
        issued = sticky.sent(window.begin().gathers)
        rows = []
        for position in range((step + 1) * len(self.passes)):
            item = window.at(position)
            movement = window.leave(position)
            released = [unit for unit in movement.releases if self.units[unit].buffer is GatherBuffer.SHARED]
            if item.phase is Phase.OPTIMIZER:
                sticky.step(item.unit)
                released += [item.unit] if self.units[item.unit].buffer is GatherBuffer.OWN else []
            if item.later == step:
                rows.append(self._row(position % len(self.passes), item, issued, released))
            issued = sticky.sent(movement.gathers)
        return rows

    def _row(self, index: int, item: Pass, issued: Sequence[int], releases: Sequence[int]) -> tuple[str, ...]:
        def names(units: Sequence[int]) -> str:
            return ", ".join(self.units[unit].name for unit in units)

        fetched = []
        if item.moe_layer is not None:
            fetched = self.following(item.phase, item.moe_layer, training=True, micro=item.micro)
        return (
            str(index),
            f"{item.phase.name.lower()} {self.units[item.unit].name}",
            names(issued),
            names(releases),
            names([item.unit] if item.phase is Phase.BACKWARD else []),
            ", ".join(f"{ahead.phase.name.lower()} {self.units[ahead.unit].name}" for ahead in fetched),
        )

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True, slots=True)
class Movement:
    """The units that are gathered and released where a pass begins or ends.

    Gathers are issued ``before`` the releases, and ``after`` them, into the memory that they freed.
    """

    before: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def gathers(self) -> tuple[int, ...]:
        return self.before + self.after


class Window:
    """The decisions of the horizontal queue, over the endlessly repeated passes of ``schedule`` (only forward passes if not
    ``training``). They depend only on passes beginning and ending.

    A cursor walks the passes that need parameters, in program order, at most ``depth`` of them ahead and within the budget,
    and never past an optimizer pass that has yet to change what it would gather. Positions count passes from 0 across steps.
    """

    def __init__(self, schedule: Schedule, *, training: bool) -> None:
        self.passes = schedule.passes if training else schedule.forward_passes
        self._schedule = schedule
        self._limits = schedule.horizontal
        #: In one cycle: the positions of passes that need parameters, and how many of these come before each position.
        self._needy = [i for i, item in enumerate(self.passes) if item.phase is not Phase.OPTIMIZER]
        self._before = [sum(n < i for n in self._needy) for i in range(len(self.passes))]
        self._changes = {item.unit: i for i, item in enumerate(self.passes) if item.phase is Phase.OPTIMIZER}
        self._cursor = 0  # passes that need parameters, counted from the start
        #: For each gathered unit: the last position that needs it.
        self._held: dict[int, int] = {}
        self.nbytes = 0

    @property
    def held(self) -> tuple[int, ...]:
        """The units that are gathered or being gathered."""
        return tuple(self._held)

    def at(self, position: int) -> Pass:
        """The pass at ``position``; its ``later`` is the number of its step."""
        turn, index = divmod(position, len(self.passes))
        return replace(self.passes[index], later=turn)

    def begin(self) -> Movement:
        """The movement before the first pass."""
        return Movement(before=self._advance(0))

    def leave(self, position: int) -> Movement:
        """The movement between the pass at ``position``, which ends, and the next one."""
        before = self._advance(position + 1)
        releases = tuple(unit for unit, until in self._held.items() if until == position)
        for unit in releases:
            del self._held[unit]
            self.nbytes -= self._schedule.units[unit].gathered
        return Movement(before, releases, self._advance(position + 1))

    def adopt(self, other: Window) -> tuple[int, ...]:
        """Take over the units of ``other`` that the first passes need; returns the units to release."""
        while (unit := self._next_unit()) in other.held and unit not in self._held:
            self._take(unit)
        return tuple(unit for unit in other.held if unit not in self._held)

    def _next_unit(self) -> int:
        return self.at(self._position(self._cursor)).unit

    def _position(self, cursor: int) -> int:
        turn, index = divmod(cursor, len(self._needy))
        return turn * len(self.passes) + self._needy[index]

    def _advance(self, position: int) -> tuple[int, ...]:
        """Move the cursor as far as allowed when the pass at ``position`` begins; returns the units to gather."""
        turn, index = divmod(position, len(self.passes))
        horizon = turn * len(self._needy) + self._before[index] + self._limits.depth
        gathers = []
        while self._cursor <= horizon and self._allowed(position):
            unit = self._next_unit()
            if unit not in self._held:
                gathers.append(unit)
            self._take(unit)
        return tuple(gathers)

    def _allowed(self, position: int) -> bool:
        target = self._position(self._cursor)
        turn, _ = divmod(target, len(self.passes))
        unit = self.at(target).unit
        change = self._changes.get(unit)
        if change is not None and turn > 0 and position <= (turn - 1) * len(self.passes) + change:
            return False
        if unit in self._held or self._limits.nbytes is None:
            return True
        return self.nbytes + self._schedule.units[unit].gathered <= self._limits.nbytes

    def _take(self, unit: int) -> None:
        until = self._position(self._cursor)
        if unit not in self._held:
            self.nbytes += self._schedule.units[unit].gathered
        if self._schedule.reshard is Reshard.AFTER_BACKWARD and self.at(until).phase is Phase.FORWARD:
            until = self._backward_of(until, unit)
        self._held[unit] = max(until, self._held.get(unit, until))
        self._cursor += 1

    def _backward_of(self, position: int, unit: int) -> int:
        wanted = (Phase.BACKWARD, unit, self.at(position).micro)
        for later in range(position + 1, position + len(self.passes)):
            item = self.at(later)
            if (item.phase, item.unit, item.micro) == wanted:
                return later
        return position  # forward passes only


def unit_schedule(
    layouts: Sequence[UnitLayout],
    dense: DenseConfig,
    prefetch: PrefetchConfig,
    *,
    moe_layers: Sequence[int],
    compute: ElementType = ComputeDtype.FP32,
    micro_batches: int = 1,
    first_block: int = 0,
    order: Sequence[MicroPass] = (),
) -> Schedule:
    """The schedule of a model with sliced dense parameters. The units ``layouts`` are embedding, blocks, norm and head;
    block ``first_block`` is unit 1. ``order``: as in ``Schedule``.

    The horizontal budget is the size of the fusion buffers: each block takes one, whatever its size; the first and last unit
    have their own buffers. The step of dense parameters is deferred even without clipping: their norm is known once all
    gradients are.
    """
    narrow = gather_width(dense, compute)
    last = len(layouts) - 1
    # At least one byte, so that fully frozen blocks also take turns with their buffers.
    buffer = max((layout.gathered_bytes(narrow) for layout in layouts[1:last]), default=0) or 1

    def unit(number: int, layout: UnitLayout) -> Unit:
        if number in (0, last):
            return Unit(layout.name, buffer=GatherBuffer.OWN)
        block = first_block + number - 1
        return Unit(layout.name, buffer, block if block in moe_layers else None, block)

    return Schedule(
        units=tuple(unit(number, layout) for number, layout in enumerate(layouts)),
        horizontal=QueueLimits(prefetch.gather_depth, buffer * blocks_held(layouts, dense)),
        vertical=QueueLimits(prefetch.depth),
        reshard=dense.reshard,
        micro_batches=micro_batches,
        order=tuple(order),
    )
