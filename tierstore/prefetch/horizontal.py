"""The horizontal queue: gathers dense parameters ahead of the passes that need them.

``Window`` decides, and ``HorizontalQueue`` carries its decisions out on the dense parameters. Module hooks (gates) around
the units call ``enter`` and ``leave`` as passes begin and end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from tierstore.cache.access import Phase
from tierstore.prefetch.schedule import Pass, Schedule, Window
from tierstore.stats import Cause, StallLedger, Tier


class DenseUnits(Protocol):
    """Sliced dense parameters by unit number, which the queue gathers and releases."""

    def gather(self, unit: int) -> None:
        """Issue the gather of a unit, without waiting for it."""
        ...

    def use(self, unit: int) -> None:
        """Wait for the gather; afterwards the unit's parameters are whole."""
        ...

    def release(self, unit: int) -> None:
        """Release the gathered parameters; their slices remain."""
        ...


class HorizontalQueue:
    """Gathers and releases ``units`` according to ``schedule``. The gates of the units call ``enter`` and ``leave``.

    A pass that is not the next one of the schedule raises RuntimeError. A forward pass of the unit whose backward pass is
    due is its recomputation (activation checkpointing) and counts as part of it. Time spent waiting for a gather is charged
    to ``ledger``.
    """

    def __init__(self, schedule: Schedule, units: DenseUnits, ledger: StallLedger | None = None) -> None:
        self._schedule = schedule
        self._units = units
        self._ledger = ledger or StallLedger()
        self._window: Window | None = None
        self._training = True
        self._position = 0
        self._open = False
        self._recomputing = False

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per step."""
        return self._schedule.micro_batches

    @property
    def optimizer_units(self) -> list[int]:
        """The units in the order of their optimizer passes."""
        return [item.unit for item in self._schedule.passes if item.phase is Phase.OPTIMIZER]

    @property
    def optimizer_is_due(self) -> bool:
        """Whether the next pass of the schedule is an optimizer pass."""
        return self._window is not None and not self._open and self._due().phase is Phase.OPTIMIZER

    def begin(self, *, training: bool) -> None:
        """Begin a step (or a forward-only run). Units that are already gathered for its first passes stay."""
        if self._open:
            raise RuntimeError("a step begins inside a pass")
        window = self._window
        if window is not None and training == self._training and self._position % len(window.passes) == 0:
            return
        self._window, self._training, self._position = Window(self._schedule, training=training), training, 0
        if window is not None:
            self._release(self._window.adopt(window))
        self._gather(self._window.begin().gathers)

    def reset(self) -> None:
        """Release everything, after the step was cut short or the slices were replaced."""
        if self._window is not None:
            self._release(self._window.held)
        self._window, self._open, self._recomputing = None, False, False

    def enter(self, unit: int, phase: Phase) -> None:
        """Begin a pass: wait for its parameters."""
        if self._open and self._recomputing and phase is Phase.BACKWARD:
            self._recomputing = False  # its recomputation has gathered the parameters
            return
        due = self._due()
        recomputing = due.phase is Phase.BACKWARD and phase is Phase.FORWARD
        if self._open or due.unit != unit or (due.phase is not phase and not recomputing):
            raise RuntimeError(
                f"{phase.name.lower()} of {self._name(unit)} begins, but {due.phase.name.lower()} of "
                f"{self._name(due.unit)} {'has not ended' if self._open else 'is next in the schedule'}"
            )
        self._open, self._recomputing = True, recomputing
        if phase is not Phase.OPTIMIZER:
            named = self._schedule.units[unit]
            layer = named.moe_layer if named.layer is None else named.layer
            with self._ledger.stall(layer=layer, tier=Tier.RANKS, cause=Cause.GATHER):
                self._units.use(unit)

    def leave(self, unit: int, phase: Phase) -> None:
        """End a pass: issue the gathers that come within the lookahead, release units that no pass within it needs."""
        if self._recomputing:
            return
        due = self._due()
        if not self._open or (due.unit, due.phase) != (unit, phase):
            raise RuntimeError(f"{phase.name.lower()} of {self._name(unit)} ends, but has not begun")
        assert self._window is not None
        movement = self._window.leave(self._position)
        self._open = False
        self._position += 1
        self._gather(movement.before)
        self._release(movement.releases)
        self._gather(movement.after)

    @contextlib.contextmanager
    def during(self, unit: int, phase: Phase) -> Iterator[None]:
        """``enter`` and ``leave`` as a context, for passes without gates (the optimizer's)."""
        self.enter(unit, phase)
        yield
        self.leave(unit, phase)

    def _due(self) -> Pass:
        if self._window is None:
            raise RuntimeError("a pass begins before the step has")
        return self._window.at(self._position)

    def _name(self, unit: int) -> str:
        return self._schedule.units[unit].name

    def _gather(self, units: Sequence[int]) -> None:
        for unit in units:
            self._units.gather(unit)

    def _release(self, units: Sequence[int]) -> None:
        for unit in units:
            self._units.release(unit)
