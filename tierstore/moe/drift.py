"""What the layers between add to the residual stream, expected from the tokens before.

Shapes: B sequences, T tokens of a pass, D width of the model.

A router that is to guess for a coming layer sees the stream without what the layers between will add. From one token of a
sequence to the next that changes little: attention reads nearly the same context, and most experts are the same ones. So the
decayed average of what they added to the sequence's last tokens, those of its prompt included, is added to the stream before
the router guesses. A single sequence must have shown a few tokens first: until then half of what is read on guesses is read
for nothing. Of a batch, what few tokens show is true of enough sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from tierstore.moe.products import fade_towards


@dataclass(frozen=True, slots=True, eq=False)
class _Average:
    """Over the last ``tokens`` of each sequence."""

    mean_B1D: Tensor
    tokens: int


class StreamDrift:
    """Of B sequences that are one batch: how their streams change from one layer to a later one, on average.

    ``lengths``: tokens of each one's prompt, where padding precedes the shorter ones.
    """

    #: The share of the average that stays when a token is added. Between .5 and .75 guesses are equally good.
    DECAY = 0.75
    #: Tokens, of all sequences, from which on averages are given.
    TOKENS = 3
    #: Tokens of a prompt that count, its last ones: all before them would weigh a tenth.
    PROMPT_TOKENS = 8

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self._lengths = lengths
        #: By the layer that is to come and the one that looks ahead to it.
        self._known: dict[int, dict[int, _Average]] = {}
        #: Last tokens of the present pass (B, T, D), in the same order.
        self._seen: dict[int, dict[int, Tensor]] = {}

    def ahead(self, layer: int, target: int, stream_BTD: Tensor) -> Tensor | None:
        """What is expected to be added (B, 1, D) to the stream of ``layer`` until ``target`` starts; None where
        too little is known. It changes when ``target`` starts.
        """
        self._seen.setdefault(target, {})[layer] = self._last(stream_BTD)
        known = self._known.get(target, {}).get(layer)
        if known is None or known.tokens * len(known.mean_B1D) < self.TOKENS:
            return None
        return known.mean_B1D

    def arrive(self, layer: int, stream_BTD: Tensor) -> None:
        """``layer`` starts from ``stream_BTD``: what was added since layers looked ahead to it joins their averages.

        An average that this pass has nothing for ends: when it is asked for again, its tokens will be long past.
        """
        before, seen = self._known.pop(layer, {}), self._seen.pop(layer, {})
        if seen:
            last = self._last(stream_BTD)
            self._known[layer] = {
                source: self._extended(before.get(source), last, start) for source, start in seen.items()
            }

    def _extended(self, known: _Average | None, now_BTD: Tensor, before_BTD: Tensor) -> _Average:
        if now_BTD.shape[1] > 1:
            return self._of_prompt(now_BTD.float() - before_BTD.float(), now_BTD.dtype)
        if known is None:
            return _Average(now_BTD - before_BTD, 1)
        fade_towards(known.mean_B1D, now_BTD, before_BTD, self.DECAY)
        return _Average(known.mean_B1D, known.tokens + 1)

    def _of_prompt(self, added_BTD: Tensor, dtype: torch.dtype) -> _Average:
        """As if its tokens had come one after another."""
        rows, tokens, _ = added_BTD.shape
        counted = [min(length, tokens) for length in self._lengths or [tokens] * rows]
        age_T1 = torch.arange(tokens - 1, -1, -1, device=added_BTD.device).unsqueeze(1)
        oldest_B11 = torch.tensor(counted, device=added_BTD.device).view(-1, 1, 1) - 1
        weight_T1 = self.DECAY**age_T1
        weight_BT1 = torch.where(age_T1 < oldest_B11, (1 - self.DECAY) * weight_T1, weight_T1)
        # What padding holds may be no number.
        weighted_BTD = (added_BTD * weight_BT1).masked_fill_(age_T1 > oldest_B11, 0)
        return _Average(weighted_BTD.sum(dim=1, keepdim=True).to(dtype), min(counted))

    def _last(self, stream_BTD: Tensor) -> Tensor:
        """The last tokens; of many, a copy that does not keep the others."""
        tokens = stream_BTD.shape[1]
        return stream_BTD if tokens == 1 else stream_BTD[:, -self.PROMPT_TOKENS :].clone()

    def select(self, rows: Sequence[int]) -> StreamDrift:
        """That of the sequences ``rows`` alone, in this order."""
        made = StreamDrift()
        made._known = {
            target: {
                source: _Average(each.mean_B1D[list(rows)], each.tokens) for source, each in known.items()
            }
            for target, known in self._known.items()
        }
        return made

    @staticmethod
    def joined(parts: Sequence[StreamDrift]) -> StreamDrift:
        """Those of several batches as one batch: what all of them know."""
        made = StreamDrift()
        first, *others = parts
        for target, known in first._known.items():
            made._known[target] = {}
            for source, own in known.items():
                each = [own, *(part._known.get(target, {}).get(source) for part in others)]
                shared = [one for one in each if one is not None]
                if len(shared) == len(each):
                    made._known[target][source] = _Average(
                        torch.cat([one.mean_B1D for one in shared]), min(one.tokens for one in shared)
                    )
        return made


#: Of the batch whose pass is under way, where a batch keeps one.
PASS_DRIFT: ContextVar[StreamDrift | None] = ContextVar("pass_drift", default=None)
