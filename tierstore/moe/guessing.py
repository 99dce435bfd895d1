"""Guesses of the experts of coming layers: their routers, applied to what the present layer starts from.

Shapes: T tokens, K experts a token, E experts, D width of the model.

A layer adds little to the residual stream, so what enters it is nearly what the next layer's router will see, and that
router's choice among it is known before the present layer's experts have been computed (Eliseev and Mazur 2023, "Fast
inference of mixture-of-experts language models with offloading", section 3.2). The stream goes through the coming layer's
own norm: that guesses better than the present one's does.

The coming router's parameters may lie in slices when they are needed. So a copy of each router and its norm is kept, taken
when the layer itself is passed: in each training pass, and in the first pass without gradients behind one. A guess in the
first micro-batch of a step is thus one step old, and in the first pass of all there is none. Routers choose as they do in
evaluation: noise and jitter are not guessed. The guess is computed on the calling thread, depends on the passes alone,
and no result depends on it.

On several ranks an expert is reached by tokens of others, too: the ranks add up what they count, in one small exchange a
pass.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tierstore.moe.exchange import gather_counts
from tierstore.parallel import Mesh
from tierstore.stats import Cause, StallLedger, Tier


@dataclass(frozen=True, slots=True, eq=False)
class LayerRouter:
    """The router of MoE layer ``layer`` and the ``norm`` before it, which is called with the residual stream (..., D).

    ``choose(router, x_TD)``: the experts (T, K) that a router of this kind takes for what the norm made, -1 for none.
    """

    layer: int
    norm: nn.Module
    router: nn.Module
    choose: Callable[[nn.Module, Tensor], Tensor]
    experts: int

    def parts(self) -> tuple[nn.Module, nn.Module]:
        return self.norm, self.router


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
    training does.
    """

    def __init__(
        self,
        routers: Sequence[LayerRouter],
        listener: GuessListener,
        *,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        training: Callable[[], bool] = torch.is_grad_enabled,
    ) -> None:
        self._routers = {router.layer: router for router in routers}
        self._listener = listener
        self._mesh = mesh if mesh is not None and mesh.data.size > 1 else None
        self._ledger = ledger or StallLedger()
        self._training = training
        self._first = min(self._routers)
        self._copies: dict[int, LayerRouter] = {}
        #: Layers whose copy may be older than their parameters.
        self._stale: set[int] = set(self._routers)
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
        return sum(
            tensor.nbytes
            for made in self._copies.values()
            for part in made.parts()
            for tensor in _tensors(part)
        )

    def _begin(self, layer: int, norm: nn.Module, arguments: tuple[Any, ...]) -> None:
        stream: Tensor = arguments[0]
        self.offer(layer, stream.detach().reshape(-1, stream.shape[-1]))

    def offer(self, layer: int, stream_TD: Tensor) -> None:
        """The pass of ``layer`` begins with ``stream_TD``; its parameters are whole. On several ranks a collective.
        Raises PeerError.
        """
        graph, training = torch.is_grad_enabled(), self._training()
        reach = self._listener.reach(layer)
        with torch.no_grad():
            if layer != self._first:  # of which no layer guesses
                self._take(layer, graph)
            targets = [target for target in reach if target in self._copies]
            if not targets:
                return
            counts = [_counted(self._copies[target], stream_TD) for target in targets]
            if self._mesh is not None:
                counts = self._of_all(torch.stack(counts), self._mesh, layer, training)
        for target, chosen_E in zip(targets, counts, strict=True):
            self._listener.offer(layer, target, chosen_E.cpu().numpy())

    def _of_all(self, own: Tensor, mesh: Mesh, layer: int, training: bool) -> list[Tensor]:
        """The sums of ``own`` over the ranks whose tokens come to this rank's experts; in training, all ranks, as what one
        replica of an expert is asked for, the others are asked for.
        """
        charge = partial(self._ledger.stall, layer=layer, tier=Tier.RANKS, cause=Cause.ALL_TO_ALL)
        all_Rn = gather_counts(own.flatten(), mesh.data, charge)
        ranks = list(range(mesh.data.size) if training else mesh.expert_sources)
        return list(all_Rn[ranks].sum(dim=0).view_as(own))

    def _take(self, layer: int, graph: bool) -> None:
        """Copies the parameters of ``layer``, unless the copy is as they are. ``graph``: the pass has one."""
        router = self._routers[layer]
        if layer in self._stale:
            held = self._copies.get(layer)
            if held is None:
                self._copies[layer] = LayerRouter(
                    layer, _twin(router.norm), _twin(router.router), router.choose, router.experts
                )
            else:
                for kept, part in zip(held.parts(), router.parts(), strict=True):
                    for old, new in zip(_tensors(kept), _tensors(part), strict=True):
                        old.copy_(new)
            self._stale.discard(layer)
        if graph and any(tensor.requires_grad for part in router.parts() for tensor in _tensors(part)):
            self._stale.add(layer)  # it may be stepped before its next pass


def _counted(router: LayerRouter, stream_TD: Tensor) -> Tensor:
    expert_TK = router.choose(router.router, router.norm(stream_TD))
    chosen_N = expert_TK[expert_TK >= 0]
    return torch.bincount(chosen_N, minlength=router.experts)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _twin(module: nn.Module) -> nn.Module:
    """A module of its own parameters and buffers that computes what ``module`` does in evaluation, without its hooks.

    Not a deep copy: hooks, and what they refer to, would come along.
    """
    made = copy.copy(module)
    fields: dict[str, Any] = made.__dict__
    for name in list(fields):
        if name.endswith("_hooks") or "_hooks_" in name:
            fields[name] = OrderedDict()
    fields["_parameters"] = {
        name: None if value is None else nn.Parameter(value.detach().clone(), requires_grad=False)
        for name, value in module._parameters.items()
    }
    fields["_buffers"] = {
        name: None if value is None else value.detach().clone() for name, value in module._buffers.items()
    }
    fields["_modules"] = {
        name: None if child is None else _twin(child) for name, child in module._modules.items()
    }
    fields["training"] = False
    return made
