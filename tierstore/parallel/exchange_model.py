"""What an exchange of rows costs at once and in two steps, by the bytes of a message (SE-MoE, section 4.2).

m nodes, p ranks of the group on each; every rank sends every other a message of b bytes. Between nodes a message costs
``message_s`` and a byte ``byte_s``; the step within the node costs ``step_s`` and a byte that it moves ``step_byte_s``
(its collective, two copies and the neighbours' links together); a collective between nodes costs ``fixed_s`` besides::

    flat(b)         = fixed + (m - 1) p message + (m - 1) p b byte
    hierarchical(b) = fixed + (m - 1) message   + (m - 1) p b byte + step + m (p - 1) b step_byte

Within the node a flat exchange runs beside its slower messages. What travels between nodes is the same, so only messages
and the further step decide, and two steps pay below one size of messages or never. ``message_s`` is what a message keeps
a link busy for; a delay that messages spend on their way together is in ``fixed_s``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.parallel.nodes import NodeGrid
from tierstore.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class MessageCost:
    """Seconds for b bytes: ``start_s + b * byte_s``."""

    start_s: float
    byte_s: float

    def seconds(self, nbytes: float) -> float:
        return self.start_s + nbytes * self.byte_s

    @classmethod
    def fitted(cls, points: Sequence[tuple[float, float]]) -> MessageCost:
        """The line through ``points`` (bytes, seconds) with the least squares of relative errors, and no negative part.

        Raises ValueError for fewer than two sizes.
        """
        if len({nbytes for nbytes, _ in points}) < 2:
            raise ValueError(f"expected points of two sizes at least, got {points}")
        weights = [1 / seconds**2 for _, seconds in points]
        total = sum(weights)
        mean_b = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
        mean_s = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
        spread = sum(w * (b - mean_b) ** 2 for w, (b, _) in zip(weights, points, strict=True))
        joint = sum(w * (b - mean_b) * (s - mean_s) for w, (b, s) in zip(weights, points, strict=True))
        byte_s = max(joint / spread, 0.0)
        return cls(max(mean_s - byte_s * mean_b, 0.0), byte_s)


@dataclass(frozen=True, slots=True)
class ExchangeModel:
    """Seconds by the bytes of a message: ``flat`` and ``hierarchical``, and ``rail``, the second of its two steps."""

    grid: NodeGrid
    flat: MessageCost
    rail: MessageCost
    hierarchical: MessageCost

    @classmethod
    def of_links(cls, grid: NodeGrid, *, within: MessageCost, between: MessageCost) -> ExchangeModel:
        """From links that are known: ``within`` for a collective of a node and a byte of it, ``between`` for a message
        between nodes.
        """
        others, each = grid.nodes - 1, grid.each
        byte_s = others * each * between.byte_s
        rail = MessageCost(others * between.start_s, byte_s)
        further_s = grid.nodes * (each - 1) * within.byte_s
        return cls(
            grid,
            MessageCost(others * each * between.start_s, byte_s),
            rail,
            MessageCost(rail.start_s + within.start_s, rail.byte_s + further_s),
        )

    @property
    def message_s(self) -> float:
        """Of a message between nodes."""
        return (self.flat.start_s - self.rail.start_s) / ((self.grid.nodes - 1) * (self.grid.each - 1))

    @property
    def step_s(self) -> float:
        """Of the step within the node, but for its bytes."""
        return self.hierarchical.start_s - self.rail.start_s

    @property
    def step_byte_s(self) -> float:
        """Of a byte in the step within the node."""
        return (self.hierarchical.byte_s - self.rail.byte_s) / (self.grid.nodes * (self.grid.each - 1))

    @property
    def below_bytes(self) -> float:
        """Two steps are faster for messages of less than this (0: for none, infinite: for all)."""
        gain_s = self.flat.start_s - self.hierarchical.start_s
        if gain_s <= 0:
            return 0.0
        loss_s = self.hierarchical.byte_s - self.flat.byte_s
        return gain_s / loss_s if loss_s > 0 else math.inf

    def describe(self) -> str:
        """What decides, in a few words."""
        byte_s = self.step_byte_s
        speed = f" and {format_bytes(round(1 / byte_s))}/s" if byte_s > 0 else ""
        return (
            f"a message between nodes costs {format_seconds(max(self.message_s, 0.0))}, the step within a node "
            f"{format_seconds(max(self.step_s, 0.0))}{speed}"
        )
