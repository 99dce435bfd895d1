"""Guesses of the experts of coming layers: their routers, applied to what the present layer starts from.

Shapes: T tokens, K experts a token, E experts, D width of the model.

A layer adds little to the residual stream, so what enters it is nearly what the next layer's router will see, and that
router's choice among it is known before the present layer's experts have been computed (Eliseev and Mazur 2023, "Fast
inference of mixture-of-experts language models with offloading", section 3.2). The stream goes through the coming layer's
own norm: that guesses better than the present one's does.

The coming router's parameters may lie in slices when they are needed. So a copy of each router and its norm is kept. It is
taken when the layer itself is passed: in every training pass, and in the first evaluation pass after training. A guess in
the first micro-batch of a step is thus one step old, and in the first pass of all there is none. Of parameters that never
change the copy is taken at once, and is one matrix, where that chooses as they do (``LayerRouter.folded``): one call instead
of a dozen small operations (a third of a millisecond on two cores). Routers choose as they do in evaluation: noise and
jitter are not guessed. The guess is computed on the calling thread, depends on the passes alone, and no result depends on
it.

In decoding, where the batch keeps a ``StreamDrift``, what the layers between will add is expected from the tokens before;
while that is not known, nothing is guessed.

On several ranks an expert is reached by tokens of others, too: the ranks add up what they count, in one small exchange a
pass.
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
    """Whom guesses are for: an expert source that looks ahead."""

    def reach(self, layer: int) -> Sequence[int]:
        """The layers that guesses are wanted of, from the pass of ``layer`` that begins; of none in a recomputation."""
        ...

    def offer(self, source: int, layer: int, chosen_E: npt.NDArray[np.int64]) -> None:
        """The router of ``layer`` chooses each expert so many times, for what ``source`` starts from."""
        ...


class RouterGuesses:
    """Hooks on the norms of ``routers`` until ``remove``: each forward pass offers its guesses to ``listener``.

    ``mesh``: the ranks whose tokens make up the global batch; with more than one, each pass is a collective, and
    waiting for the others is charged to ``ledger``. ``training``: whether the present pass asks for experts as
    training does. ``frozen``: the parameters of ``routers`` never change, and streams are of this type.
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
        self._first = min(self._routers)  # of which no layer guesses
        self._copies: dict[int, LayerRouter | FoldedRouter] = {}
        #: Layers whose copy may be older than their parameters, where these change.
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
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def nbytes(self) -> int:
        """What the copies hold."""
        return sum(made.nbytes for made in self._copies.values())

    def _begin(self, layer: int, norm: nn.Module, arguments: tuple[Any, ...]) -> None:
        stream: Tensor = arguments[0]
        self.offer(layer, stream.detach())

    def offer(self, layer: int, stream: Tensor) -> None:
        """The pass of ``layer`` begins with ``stream``; its parameters are whole. On several ranks a collective.
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
        if self._mesh is not None:
            counts_E = self._of_all(counts_E, self._mesh, layer, training)
        (found_E,) = read(counts_E)
        for target, chosen_E in zip(targets, found_E.numpy(), strict=True):
            self._listener.offer(layer, target, chosen_E)

    def _count(self, layer: int, target: int, stream: Tensor, drift: StreamDrift | None) -> Tensor:
        """How often ``target`` is guessed to choose each expert (E,) for the stream that ``layer`` starts from."""
        added = None
        if drift is not None:
            added = drift.ahead(layer, target, stream)
            if added is None and stream.shape[1] == 1:
                # An offer of no expert. Without any offer a predictor goes by how often experts were used before.
                return torch.zeros(self._routers[target].experts, dtype=torch.int64)
        return self._copies[target].count(stream, added)

    def _of_all(self, own: Tensor, mesh: Mesh, layer: int, training: bool) -> Tensor:
        """The sums of ``own`` over the ranks whose tokens come to this rank's experts; in training, all ranks, as what one
        replica of an expert is asked for, the others are asked for.
        """
        charge = partial(self._ledger.stall, layer=layer, tier=Tier.RANKS, cause=Cause.ALL_TO_ALL)
        all_Rn = gather_counts(own.flatten(), mesh.data, charge)
        ranks = list(range(mesh.data.size) if training else mesh.expert_sources)
        return all_Rn[ranks].sum(dim=0).view_as(own)

    def _take(self, layer: int, graph: bool) -> None:
        """Copies the parameters of ``layer``, unless the copy is as they are. ``graph``: the pass has one."""
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
#
# A router that guesses for a coming layer sees the stream without what the layers between will add. From one token of
# a sequence to the next that changes little: attention reads nearly the same context, and most experts are the same
# ones. So the decayed average of what they added to the sequence's last tokens, those of its prompt included, is
# added to the stream before the router guesses. A single sequence must have shown a few tokens first: until then half
# of what is read on guesses is wasted. Of a batch, what few tokens show is true of enough sequences.


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
