"""Forward passes that go on side by side and meet at their experts: one lease of an expert serves all of them.

Each pass runs in a greenlet of its own, as the micro-batches of a step in layer order do (``train.layer_order.passes``). It
stops where it calls for experts; when all have come there, the experts that any of them asks for are leased once, and each
pass's rows are computed by themselves. So a pass has the bits that it has alone.

Where it is known which sequence each token belongs to, the source is told which sequences ask for which expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from greenlet import greenlet
from torch import Tensor

from tierstore.moe.computing import ExpertPass
from tierstore.moe.joint import forward_together
from tierstore.moe.source import SourceSlot
from tierstore.serve.batch.askers import askers_of
from tierstore.serve.experts.interface import ServedExperts

ExpertCall = tuple[Tensor, Tensor, ExpertPass]


@dataclass(frozen=True, slots=True)
class Telling:
    """Who is told which sequences ask for which expert. ``bits[i]``: those of pass i (``askers_of``)."""

    experts: ServedExperts
    bits: Sequence[Sequence[int]]


class MeetingPasses:
    """Forward passes over a model whose experts are leased through ``slot``."""

    def __init__(self, slot: SourceSlot) -> None:
        self._slot = slot

    def run(self, passes: Sequence[Callable[[], Tensor]], telling: Telling | None = None) -> list[Tensor]:
        """What each of ``passes`` returns. They are passes of one model: all of them call for experts of the same layers.

        Raises what one of them or its source raises; none goes on then.
        """
        if len(passes) == 1 and telling is None:
            return [passes[0]()]
        lanes = [greenlet(each) for each in passes]
        self._slot.meeting = self
        try:
            return self._run(lanes, telling)
        finally:
            self._slot.meeting = None
            for lane in lanes:
                if not lane.dead:
                    lane.throw()  # ends it: what it has open is closed

    def compute(self, x_TD: Tensor, weight_TK: Tensor, call: ExpertPass) -> Tensor:
        """The experts' results for the pass that is under way: it stops here until they are there (``Meeting``)."""
        parent = greenlet.getcurrent().parent
        assert parent is not None
        result: Tensor = parent.switch((x_TD, weight_TK, call))
        return result

    def _run(self, lanes: Sequence[greenlet], telling: Telling | None) -> list[Tensor]:
        stops: list[ExpertCall | Tensor] = [lane.switch() for lane in lanes]
        while calls := [stop for stop in stops if not isinstance(stop, Tensor)]:
            if len(calls) < len(lanes):
                raise RuntimeError("some passes of a model end where others call for experts")
            stops.clear()
            if telling is not None:
                telling.experts.tell_askers(askers_of([call for _, _, call in calls], telling.bits))
            results = forward_together(self._slot, calls)
            del calls
            stops.extend(lane.switch(results.pop(0)) for lane in lanes)
        return [stop for stop in stops if isinstance(stop, Tensor)]
