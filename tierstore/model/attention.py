"""RMSNorm, rotary positions, causal attention, and the key-value cache of decoding.

Shapes: B sequences, S positions, H heads, C width of a head, D = H * C; with T tensor-parallel ranks H / T heads each. In
decoding T tokens follow those in the cache, S tokens with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tierstore.model.config import ATTENTION
from tierstore.moe.experts import weight_std
from tierstore.moe.seeds import keyed_generator
from tierstore.parallel import TensorRanks


@dataclass(slots=True, eq=False)
class LayerKeyValues:
    """``keys`` and ``values`` (B, H, S, C) of one block, None before the first token."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def update(self, keys_BHTC: Tensor, values_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the keys and values of this pass; returns all."""
        if self.keys is None or self.values is None:
            self.keys, self.values = keys_BHTC.contiguous(), values_BHTC.contiguous()
        else:
            self.keys = torch.cat((self.keys, keys_BHTC), dim=2)
            self.values = torch.cat((self.values, values_BHTC), dim=2)
        return self.keys, self.values


@dataclass(slots=True, eq=False)
class KeyValueCache:
    """The keys and values of all blocks, in order."""

    layers: list[LayerKeyValues] = field(default_factory=list)

    @classmethod
    def of(cls, blocks: int) -> KeyValueCache:
        """An empty cache for a model of ``blocks`` blocks."""
        return cls([LayerKeyValues() for _ in range(blocks)])


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """The tokens of a pass that follow one block's cache ``held``: ``visible_BTS`` tells which tokens each sees (None:
    every token sees all).
    """

    held: LayerKeyValues
    visible_BTS: Tensor | None


def visible_tokens(mask_BS: Tensor, tokens: int) -> Tensor | None:
    """Which of S tokens each of the last ``tokens`` sees, as (B, T, S): those up to itself, without padding.

    ``mask_BS``: 1 for a token, 0 for padding before the first. A padding token sees itself, to avoid NaN. None if a
    single token sees all.
    """
    batch, length = mask_BS.shape
    present_BS = mask_BS.bool()
    if tokens == 1 and bool(present_BS.all()):
        return None
    positions_S = torch.arange(length, device=mask_BS.device)
    causal_TS = positions_S[None, :] <= positions_S[length - tokens :, None]
    itself_TS = positions_S[None, :] == positions_S[length - tokens :, None]
    return (causal_TS & present_BS[:, None, :]) | itself_TS.expand(batch, tokens, length)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich 2019), in fp32 or wider, cast back."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), (x.shape[-1],), self.weight.to(wide), self.eps)
        return y.to(x.dtype)


def rotary_tables(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (S, C / 2) each in fp32, of ``s * theta**(-2i / C)`` (Su et al. 2021, equation 15).

    The angles are computed in fp64: fp32 angles of late positions cannot tell neighbours apart.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()


def rotate(x_BHSC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs ``(x[i], x[i + C/2])`` of each head by their position's angles, in fp32 or wider."""
    wide = torch.promote_types(x_BHSC.dtype, torch.float32)
    first, second = x_BHSC.to(wide).chunk(2, dim=-1)
    cos, sin = cos.to(wide), sin.to(wide)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BHSC.dtype)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions, without biases.

    With ``tensor``, each of its ranks holds and computes ``n_heads / T`` heads, and a pass is a collective of them.
    """

    def __init__(
        self, d_model: int, n_heads: int, *, seed: int = 0, layer: int = 0, tensor: TensorRanks | None = None
    ) -> None:
        super().__init__()
        self._tensor = tensor or TensorRanks()
        #: Heads of this rank.
        self.n_heads = n_heads // self._tensor.size
        qkv, out = torch.empty(3 * d_model, d_model), torch.empty(d_model, d_model)
        std = weight_std(d_model)
        nn.init.normal_(qkv, std=std, generator=keyed_generator(seed, "attention.qkv", layer))
        nn.init.normal_(out, std=std, generator=keyed_generator(seed, "attention.out", layer))
        of_qkv, of_out = ATTENTION
        self.qkv = self._tensor.parameter(qkv, of_qkv)
        self.out = self._tensor.parameter(out, of_out)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, following: Following | None = None) -> Tensor:
        """``cos`` and ``sin``: of positions from 0 on; for tokens ``following`` others, of each token, (B, 1, S, C / 2)."""
        batch, positions, _ = x_BSD.shape
        qkv = F.linear(self._tensor.enter(x_BSD), self.qkv.to(x_BSD.dtype))
        width = qkv.shape[-1] // 3  # explicit, since -1 cannot be inferred for a rank without sequences
        heads = qkv.view(batch, positions, 3, self.n_heads, width // self.n_heads).permute(2, 0, 3, 1, 4)
        if following is None:
            query, key = rotate(heads[:2], cos[:positions], sin[:positions]).unbind(0)
            mixed = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True)
        else:
            query, key = rotate(heads[:2], cos, sin).unbind(0)
            keys, values = following.held.update(key, heads[2])
            visible = None if following.visible_BTS is None else following.visible_BTS.unsqueeze(1)
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
        joined = mixed.transpose(1, 2).reshape(batch, positions, width)
        return self._tensor.leave(F.linear(joined, self.out.to(x_BSD.dtype)))
