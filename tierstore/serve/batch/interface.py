"""What continues sequences, as the scheduler sees it.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Joined:
    """A sequence that is in the batch from now on: its ``number``, and the logits (V,) of what follows its prompt."""

    number: int
    logits_V: Tensor


class BatchRunner(Protocol):
    """Sequences that a model continues together. Sequences join and leave between steps. One caller: the thread that runs
    the model.

    Whatever a pass raises (ChecksumError, OSError, BudgetError), the sequences that were in it have left, and all others
    are as they were: the next call is good.
    """

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sequences in the batch, in the order in which they joined."""
        ...

    def join(self, prompts: Sequence[Sequence[int]]) -> list[Joined]:
        """Prefill: computes ``prompts`` (each of at least one token) together, each layer once. Raises BudgetError where
        the batch has no room for so many.
        """
        ...

    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> Joined:
        """A sequence joins that had left when its pass failed, with the ``tokens`` (at least one) that followed ``prompt``;
        the logits are of what follows them. Raises what ``join`` and ``step`` do.
        """
        ...

    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """Decoding: each sequence of ``tokens`` goes on with one token; returns the logits (V,) of what follows it."""
        ...

    def leave(self, number: int) -> None:
        """The sequence has ended: its memory is free."""
        ...
