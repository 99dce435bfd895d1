"""The time in which the residency core decides an access, without a store, a byte or a read.

Experts lie in layers of 256, as in the largest models. A step passes the layers forward, needing weights, and backward,
needing moments too; each access asks for 64 experts of its layer, some more often than others. A tenth of the records
fits, so nearly every access evicts. The number of accesses that are timed is the same for every n.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierstore._native import Residency
from tierstore.cache.access import Need, Phase

EXPERTS = 256  # of a layer
_WIDTH = 64  # experts of an access
_CAPACITY = 0.1  # of all frames
_FRAMES = (1, 2, 1)  # of weights, moments and a gradient
_VARIANTS = 16  # different choices of experts, taken in turn


@dataclass(frozen=True)
class DecisionProgram:
    """The walk of a training program through ``records`` records."""

    records: int
    layers: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", max(self.records // EXPERTS, 1))

    @property
    def width(self) -> int:
        """Experts of one access."""
        return min(_WIDTH, self.records // self.layers)

    def layer_of(self, record: int) -> int:
        return min(record // (self.records // self.layers), self.layers - 1)

    def choices(self) -> list[NDArray[np.uint32]]:
        """Sets of experts, by their places in a layer: the r-th in proportion to 1/r."""
        rng = np.random.default_rng(0)
        experts = self.records // self.layers
        odds = 1 / np.arange(1, experts + 1)
        return [
            np.sort(rng.choice(experts, self.width, replace=False, p=odds / odds.sum())).astype(np.uint32)
            for _ in range(_VARIANTS)
        ]

    def passes(self) -> Iterator[tuple[Phase, int, Need]]:
        """One step: each access's phase, layer and need."""
        for layer in range(self.layers):
            yield Phase.FORWARD, layer, Need.WEIGHTS
        for layer in reversed(range(self.layers)):
            yield Phase.BACKWARD, layer, Need.STEP


def make_core(program: DecisionProgram, policy: str) -> Residency:
    """A residency core that knows the records of ``program``, all of them on disk."""
    capacity = max(int(program.records * sum(_FRAMES[:2]) * _CAPACITY), program.width * sum(_FRAMES))
    core = Residency(capacity, policy=policy)
    for record in range(program.records):
        core.add_record(program.layer_of(record), list(_FRAMES), [4096 * f for f in _FRAMES], 3)
    return core


def access_times(program: DecisionProgram, policy: str, *, accesses: int, repeats: int) -> list[float]:
    """Seconds an access in each of ``repeats`` stretches of ``accesses``, after one whole step that is not timed."""
    core, choices = make_core(program, policy), program.choices()
    width, stride = program.width, program.records // program.layers
    flags = {need: np.full(width, need, np.uint16) for need in (Need.WEIGHTS, Need.STEP)}
    turn = itertools.count()

    def walk(wanted: Iterator[tuple[Phase, int, Need]]) -> None:
        for phase, layer, need in wanted:
            records = choices[next(turn) % _VARIANTS] + np.uint32(layer * stride)
            groups, _ = core.begin_access(phase, layer, records, flags[need])
            for _ in range(groups):
                core.next_group()
                core.end_group()
            if phase is Phase.BACKWARD and layer == 0:
                core.end_step()

    walk(program.passes())
    forever = (each for _ in itertools.count() for each in program.passes())
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        walk(itertools.islice(forever, accesses))
        times.append((time.perf_counter() - begun) / accesses)
    return times


def access_curve(sizes: Sequence[int], policy: str, *, accesses: int, repeats: int) -> dict[int, list[float]]:
    """``access_times`` by the number of records."""
    return {
        size: access_times(DecisionProgram(size), policy, accesses=accesses, repeats=repeats)
        for size in sizes
    }
