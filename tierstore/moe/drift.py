"""What the layers between add to the residual stream, expected from the tokens before.

Shapes: B sequences, T tokens of a pass, D width of the model.

A router that is to guess for a coming layer sees the stream without what the layers between will add. From one token of a
sequence to the next that changes little: attention reads nearly the same context, and most experts are the same ones. So the
decayed average of what they added to the sequence's last tokens is added to the stream before the router guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor


class StreamDrift:
    """Of B sequences that are one batch: how their streams change from one layer to a later one, on average."""

    #: The share of the average that stays when a token is added. Between .5 and .75 guesses are equally good.
    DECAY = 0.75

    def __init__(self) -> None:
        #: Averages (B, 1, D), by the layer that is to come and the one that looks ahead to it.
        self._mean: dict[int, dict[int, Tensor]] = {}
        #: Last tokens of the present pass (B, 1, D), in the same order.
        self._seen: dict[int, dict[int, Tensor]] = {}

    def ahead(self, layer: int, target: int, stream_BTD: Tensor) -> Tensor:
        """What the stream that ``layer`` starts from is expected to be where ``target``, which comes later, starts."""
        self._seen.setdefault(target, {})[layer] = _last(stream_BTD)
        mean = self._mean.get(target, {}).get(layer)
        return stream_BTD if mean is None else stream_BTD + mean

    def arrive(self, layer: int, stream_BTD: Tensor) -> None:
        """``layer`` starts from ``stream_BTD``: what was added since layers looked ahead to it joins their averages.

        An average that this pass has nothing for ends: when it is asked for again, its tokens will be long past.
        """
        known, last = self._mean.pop(layer, {}), _last(stream_BTD)
        means = {}
        for source, seen in self._seen.pop(layer, {}).items():
            added, mean = last - seen, known.get(source)
            means[source] = added if mean is None else torch.lerp(added, mean, self.DECAY)
        if means:
            self._mean[layer] = means

    def select(self, rows: Sequence[int]) -> StreamDrift:
        """That of the sequences ``rows`` alone, in this order."""
        made = StreamDrift()
        made._mean = {
            target: {source: mean[list(rows)] for source, mean in means.items()}
            for target, means in self._mean.items()
        }
        return made

    @staticmethod
    def joined(parts: Sequence[StreamDrift]) -> StreamDrift:
        """Those of several batches as one batch: what all of them know."""
        made = StreamDrift()
        first, *others = parts
        for target, means in first._mean.items():
            shared = [
                source for source in means if all(source in each._mean.get(target, {}) for each in others)
            ]
            made._mean[target] = {
                source: torch.cat([each._mean[target][source] for each in parts]) for source in shared
            }
        return made


def _last(stream_BTD: Tensor) -> Tensor:
    """The last tokens; of several, a copy that does not keep the others."""
    return stream_BTD if stream_BTD.shape[1] == 1 else stream_BTD[:, -1:].clone()


#: Of the batch whose pass is under way, where a batch keeps one.
PASS_DRIFT: ContextVar[StreamDrift | None] = ContextVar("pass_drift", default=None)
