"""The known future: training walks the layers forward, then backward, then forward again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.cache.access import Phase

__all__ = ["Pass", "PassSequence"]


@dataclass(frozen=True)
class Pass:
    """One layer's turn. ``later``: it belongs to a micro-batch (or step) after the present one."""

    phase: Phase
    layer: int
    later: int = 0


class PassSequence:
    """Which passes follow a given one, for MoE layers ``layers`` in model order."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._forward = [Pass(Phase.FORWARD, layer) for layer in layers]
        self._training = self._forward + [Pass(Phase.BACKWARD, layer) for layer in reversed(layers)]

    def after(self, phase: Phase, layer: int, depth: int, *, training: bool) -> list[Pass]:
        """The ``depth`` passes that follow ``layer``'s ``phase``, nearest first."""
        cycle = self._training if training else self._forward
        here = next(i for i, item in enumerate(cycle) if item.phase is phase and item.layer == layer)
        following = []
        for position in range(here + 1, here + 1 + depth):
            turn, index = divmod(position, len(cycle))
            following.append(Pass(cycle[index].phase, cycle[index].layer, turn))
        return following
