"""Keys and values of the tokens before, for decoding with the built-in model.

Shapes: B sequences, H heads, T tokens of this pass, S tokens with those before, C width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class LayerKeyValues:
    """Of one block: ``keys`` and ``values`` (B, H, S, C), None before the first token."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def update(self, keys_BHTC: Tensor, values_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """Appends those of this pass; returns all."""
        if self.keys is None or self.values is None:
            self.keys, self.values = keys_BHTC.contiguous(), values_BHTC.contiguous()
        else:
            self.keys = torch.cat((self.keys, keys_BHTC), dim=2)
            self.values = torch.cat((self.values, values_BHTC), dim=2)
        return self.keys, self.values


@dataclass(slots=True, eq=False)
class KeyValueCache:
    """Of all blocks, in order."""

    layers: list[LayerKeyValues] = field(default_factory=list)

    @classmethod
    def of(cls, blocks: int) -> KeyValueCache:
        """A cache without tokens for a model of ``blocks`` blocks."""
        return cls([LayerKeyValues() for _ in range(blocks)])


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """Where the tokens of a pass lie behind those of one block's cache: ``visible_BTS`` says which tokens each sees (None:
    every token sees all that are there), ``held`` is what the block keeps.
    """

    held: LayerKeyValues
    visible_BTS: Tensor | None


def visible_tokens(mask_BS: Tensor, tokens: int) -> Tensor | None:
    """Which of S tokens each of the last ``tokens`` sees, as (B, T, S): those up to itself that are no padding.

    ``mask_BS``: 1 for a token, 0 for padding before the first. A row of padding sees itself, so that it stays a number.
    None where a single token sees all.
    """
    batch, length = mask_BS.shape
    present_BS = mask_BS.bool()
    if tokens == 1 and bool(present_BS.all()):
        return None
    positions_S = torch.arange(length, device=mask_BS.device)
    causal_TS = positions_S[None, :] <= positions_S[length - tokens :, None]
    itself_TS = positions_S[None, :] == positions_S[length - tokens :, None]
    return (causal_TS & present_BS[:, None, :]) | itself_TS.expand(batch, tokens, length)
