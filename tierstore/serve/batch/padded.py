"""One padded batch for all sequences: each matrix of the dense parts is read once for them.

Sequences that join are prefilled as a batch of their own, and then put beside those under way, all padded to the longest.
Where a model's caches cannot be padded anew (windows, linear attention: ``apart`` says so), each batch that joined stays
one, and the batches' passes meet at the experts.

The bits of a sequence depend on the batch that it is in, as in transformers: they are those of its ``generate`` for the same
padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from tierstore.moe.guessing import StreamDrift
from tierstore.serve.batch.grouped import GroupedRunner, SequenceGroup
from tierstore.serve.batch.interface import Joined
from tierstore.serve.model.caches import move, why_apart


class PaddedRunner(GroupedRunner):
    """Sequences that are one batch."""

    @cached_property
    def apart(self) -> str:
        """Why sequences that join at different times are not one batch; empty where they are."""
        return why_apart(self.model.new_cache())

    def describe(self) -> str:
        if self.apart:
            return f"padded: one for the sequences that join together, since {self.apart}"
        return "padded: one for all sequences"

    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> Joined:
        """In one prefill, as the bits of a padded batch depend on its passes anyhow."""
        (joined,) = self.join([(*prompt, *tokens)])
        return joined

    def _parts(self, rows: Sequence[int]) -> list[list[int]]:
        return [list(rows)]

    def _arranged(self, groups: list[SequenceGroup]) -> list[SequenceGroup]:
        if len(groups) == 1 or self.apart:
            return groups
        groups.sort(key=lambda group: group.numbers)
        length = max(group.mask_BS.shape[1] for group in groups)
        padding = [length - group.mask_BS.shape[1] for group in groups]
        cache = self.model.new_cache()
        move([group.cache for group in groups], cache, padding)
        mask_BS = torch.cat(
            [
                torch.nn.functional.pad(group.mask_BS, (columns, 0))
                for group, columns in zip(groups, padding, strict=True)
            ]
        )
        numbers = [number for group in groups for number in group.numbers]
        drift = StreamDrift.joined([group.drift for group in groups])
        return [SequenceGroup(numbers, cache, mask_BS, drift)]
