"""Guesses of the experts of coming layers: their routers, applied to the input of the present layer.

Shapes: T tokens, K experts a token, E experts, D width of the model.

A layer adds little to the residual stream, so its input is close to what the next layer's router will see, and that
router's choice can be guessed before the present layer's experts have been computed (Eliseev and Mazur 2023, "Fast
inference of mixture-of-experts language models with offloading", section 3.2). The stream goes through the coming layer's
own norm, which guesses better than the present layer's.

The coming router's parameters may be sharded when they are needed, so a copy of each router and its norm is kept. It is
taken when the layer itself runs: in every training pass, and in the first evaluation pass after training. A guess in the
first micro-batch of a step is thus one step old, and the very first pass has none. If parameters never change, the copy is
taken at once, as a single matrix if that makes the same choice (``LayerRouter.folded``): one call instead of a dozen small
operations (a third of a millisecond on two cores). Routers choose as in evaluation: noise and jitter are not guessed. The
guess is computed on the calling thread and depends on the passes alone; no result depends on it.

In decoding, if the batch keeps a ``StreamDrift``, what the layers between will add is estimated from the tokens before;
until that is known, nothing is guessed.

On several ranks an expert also gets tokens of other ranks: the ranks sum their counts, in one small exchange per pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tierstore.accelerator import read
from tierstore.moe.exchange import gather_counts
from tierstore.moe.products import fade_towards
from tierstore.moe.router import FoldedRouter, LayerRouter
from tierstore.parallel import Mesh
from tierstore.stats import Cause, StallLedger, Tier


class GuessListener(Protocol):
    """Receives guesses: an expert source that looks ahead."""

    def reach(self, layer: int) -> Sequence[int]:
        """The layers to guess for when the pass of ``layer`` begins; none in a recomputation."""
        ...

    def offer(self, source: int, layer: int, chosen_E: npt.NDArray[np.int64]) -> None:
        """The router of ``layer`` chooses each expert this many times, given the input of layer ``source``."""
        ...


class RouterGuesses:
    """Hooks on the norms of ``routers`` until ``remove``: each forward pass offers guesses to ``listener``.

    ``mesh``: the ranks whose tokens make up the global batch; with more than one, each pass is a collective, and
    waiting for the others is charged to ``ledger``. ``training``: whether the present pass requests experts as
    training does. ``frozen``: the parameters of ``routers`` never change, and streams have this type.
    """

    def __init__(
        self,
        routers: Sequence[LayerRouter],
        listener: GuessListener,
        *,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        training: Callable[[], bool] = torch.is_grad_enabled,
        frozen: torch.dtype | None = None,
    ) -> None:
        self._routers = {router.layer: router for router in routers}
        self._listener = listener
        self._mesh = mesh if mesh is not None and mesh.data.size > 1 else None
        self._ledger = ledger or StallLedger()
        self._training = training
        self._frozen = frozen is not None
        self._first = min(self._routers, default=None)  # no layer guesses for it
        self._copies: dict[int, LayerRouter | FoldedRouter] = {}
        #: Layers whose parameters may have changed since they were copied.
        self._stale: set[int] = set(self._routers)
        if frozen is not None:
            with torch.no_grad():
                for router in routers:
                    if router.layer != self._first:
                        copied = router.copied()
                        self._copies[router.layer] = copied.folded(frozen) or copied
        self._handles = [
            router.norm.register_forward_pre_hook(partial(self._begin, router.layer)) for router in routers
        ]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(made.nbytes for made in self._copies.values())

    def _begin(self, layer: int, norm: nn.Module, arguments: tuple[Any, ...]) -> None:
        stream: Tensor = arguments[0]
        self.offer(layer, stream.detach())

    def offer(self, layer: int, stream: Tensor) -> None:
        """The pass of ``layer`` begins with ``stream``; its parameters are gathered. A collective on several ranks.
        Raises PeerError.
        """
        graph, training = torch.is_grad_enabled(), self._training()
        if graph:
            with torch.no_grad():
                self._offer(layer, stream, graph=True, training=training)
        else:
            self._offer(layer, stream, graph=False, training=training)

    def _offer(self, layer: int, stream: Tensor, *, graph: bool, training: bool) -> None:
        drift = PASS_DRIFT.get()
        reach = self._listener.reach(layer)
        if not self._frozen and layer != self._first:
            self._take(layer, graph)
        if drift is not None:
            drift.arrive(layer, stream)
        targets = [target for target in reach if target in self._copies]
        if not targets:
            return
        counts_E = torch.stack([self._count(layer, target, stream, drift) for target in targets])
        if self._mesh is None:
            (found_E,) = read(counts_E)
        else:
            found_E = self._of_all(counts_E, self._mesh, layer, training)
        for target, chosen_E in zip(targets, found_E.numpy(), strict=True):
            self._listener.offer(layer, target, chosen_E)

    def _count(self, layer: int, target: int, stream: Tensor, drift: StreamDrift | None) -> Tensor:
        """How often each expert (E,) of ``target`` is guessed to be chosen, given the input of ``layer``."""
        added = None
        if drift is not None:
            added = drift.ahead(layer, target, stream)
            if added is None and stream.shape[1] == 1:
                # A guess of no expert. Without any guess, a predictor goes by how often experts were used before.
                return torch.zeros(self._routers[target].experts, dtype=torch.int64, device=stream.device)
        return self._copies[target].count(stream, added)

    def _of_all(self, own: Tensor, mesh: Mesh, layer: int, training: bool) -> Tensor:
        """On the host, the sums of ``own`` over the ranks whose tokens use this rank's experts; in training over all ranks,
        because all replicas of an expert are then requested together.
        """
        charge = partial(self._ledger.stall, layer=layer, tier=Tier.RANKS, cause=Cause.ALL_TO_ALL)
        all_Rn = mesh.data.read(gather_counts(own.flatten(), mesh.data, charge))
        ranks = list(range(mesh.data.size) if training else mesh.expert_sources)
        return all_Rn[ranks].sum(dim=0).view_as(own)

    def _take(self, layer: int, graph: bool) -> None:
        """Copy the parameters of ``layer`` unless the copy is current. ``graph``: whether the pass records a graph."""
        router = self._routers[layer]
        if layer in self._stale:
            held = self._copies.get(layer)
            if isinstance(held, LayerRouter):
                held.take(router)
            else:
                self._copies[layer] = router.copied()
            self._stale.discard(layer)
        if graph and any(tensor.requires_grad for tensor in router.tensors):
            self._stale.add(layer)  # it may be stepped before its next pass


# The drift of the stream ------------------------------------------------------------------------------------
#
# Shapes: B sequences, T tokens of a pass, D width of the model.
# A router that guesses for a coming layer sees the stream without what the layers between will add. From one token of
# a sequence to the next that changes little: attention reads nearly the same context, and most experts are the same.
# So the decayed average of what was added to the sequence's last tokens, including its prompt, is added to the stream
# before the router guesses. A single sequence must have produced a few tokens first: until then, half of the reads on
# guesses are wasted. In a batch, averages over few tokens are right for enough of the sequences.


@dataclass(frozen=True, slots=True, eq=False)
class _Average:
    """The average over the last ``tokens`` of each sequence."""

    mean_B1D: Tensor
    tokens: int


class StreamDrift:
    """How the streams of the B sequences of a batch change from one layer to a later one, on average.

    ``lengths``: tokens of each prompt, if the shorter ones are padded on the left.
    """

    #: The weight that the average keeps when a token is added. Guesses are equally good between .5 and .75.
    DECAY = 0.75
    #: Averages are used from this number of tokens on, over all sequences.
    TOKENS = 3
    #: The last tokens of a prompt, which alone count: all before them would weigh a tenth.
    PROMPT_TOKENS = 8

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self._lengths = lengths
        #: Averages by target layer, then by the layer that looks ahead to it.
        self._known: dict[int, dict[int, _Average]] = {}
        #: Last tokens of the present pass (B, T, D), by the same keys.
        self._seen: dict[int, dict[int, Tensor]] = {}

    def ahead(self, layer: int, target: int, stream_BTD: Tensor) -> Tensor | None:
        """What is expected to be added (B, 1, D) to the stream from ``layer`` until ``target`` starts; None if too little
        is known. The tensor changes when ``target`` starts.
        """
        self._seen.setdefault(target, {})[layer] = self._last(stream_BTD)
        known = self._known.get(target, {}).get(layer)
        if known is None or known.tokens * len(known.mean_B1D) < self.TOKENS:
            return None
        return known.mean_B1D

    def arrive(self, layer: int, stream_BTD: Tensor) -> None:
        """``layer`` starts from ``stream_BTD``: update the averages of the layers that looked ahead to it.

        An average without new data in this pass is dropped: when it is needed again, its tokens will be long past.
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
        """The average as if the prompt's tokens had come one after another."""
        rows, tokens, _ = added_BTD.shape
        counted = [min(length, tokens) for length in self._lengths or [tokens] * rows]
        age_T1 = torch.arange(tokens - 1, -1, -1, device=added_BTD.device).unsqueeze(1)
        oldest_B11 = torch.tensor(counted, device=added_BTD.device).view(-1, 1, 1) - 1
        weight_T1 = self.DECAY**age_T1
        weight_BT1 = torch.where(age_T1 < oldest_B11, (1 - self.DECAY) * weight_T1, weight_T1)
        # Padding may hold NaN.
        weighted_BTD = (added_BTD * weight_BT1).masked_fill_(age_T1 > oldest_B11, 0)
        return _Average(weighted_BTD.sum(dim=1, keepdim=True).to(dtype), min(counted))

    def _last(self, stream_BTD: Tensor) -> Tensor:
        """The last tokens; of many, a copy that does not keep the others alive."""
        tokens = stream_BTD.shape[1]
        return stream_BTD if tokens == 1 else stream_BTD[:, -self.PROMPT_TOKENS :].clone()

    def select(self, rows: Sequence[int]) -> StreamDrift:
        """The drift of the sequences ``rows``, in this order."""
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
        """The drift of several batches joined into one: the averages that all of them have."""
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


#: The drift of the batch whose pass is running, if the batch keeps one.
PASS_DRIFT: ContextVar[StreamDrift | None] = ContextVar("pass_drift", default=None)
