"""The MoE layer: route, dispatch, compute each expert whole, combine.

Shapes: T tokens, K experts a token, N assignments, D width of the model, P what feeds the activation (2F
or F).

Experts are not parameters of this module: they come from an :class:`ExpertSource` (``tierstore.moe.source``).
Experts without a token are never requested.

On several ranks (``mesh``), tokens travel to the ranks that own their experts and results travel back; every
forward and backward pass is then a collective of all ranks, with or without tokens. Each rank differentiates
its share of the global batch's objective, so that gradients are sums over ranks. Replicas of an expert get its
gradient from their own tokens; the source sums it over them (see ``ExpertSource``).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import (
    BUILT_IN_ACTIVATIONS,
    Activation,
    ExpertShape,
    RouterConfig,
    SaveActivations,
    network_divisions,
)
from tierstore.moe.dispatch import dispatch
from tierstore.moe.experts import feed_forward, weight_std
from tierstore.moe.router import NoiseKey, Router, Routing
from tierstore.moe.seeds import keyed_generator
from tierstore.moe.source import ExpertSource, rows_to
from tierstore.parallel import Mesh, TensorRanks
from tierstore.parallel.collectives import Charge
from tierstore.stats import Cause, StallLedger, Tier


class FeedForward(nn.Module):
    """A feed-forward network with ordinary parameters: a dense block's, or a shared expert.

    With ``tensor``, each of its ranks holds and computes a part of the inner width, and a pass is a collective of them.
    """

    def __init__(
        self, shape: ExpertShape, *, seed: int = 0, name: str = "ffn", tensor: TensorRanks | None = None
    ) -> None:
        super().__init__()
        self.activation = Activation(shape.activation)
        self._tensor = tensor or TensorRanks()
        inner, down = torch.empty(shape.inner_rows, shape.d_model), torch.empty(shape.d_model, shape.d_ff)
        std = weight_std(shape.d_model)
        nn.init.normal_(inner, std=std, generator=keyed_generator(seed, name, "inner"))
        nn.init.normal_(down, std=std, generator=keyed_generator(seed, name, "down"))
        of_inner, of_down = network_divisions(self.activation)
        self.inner = self._tensor.parameter(inner, of_inner)
        self.down = self._tensor.parameter(down, of_down)

    def forward(self, x: Tensor) -> Tensor:
        y = feed_forward(self._tensor.enter(x), self.inner, self.down, self.activation)
        return self._tensor.leave(y)


class MoELayer(nn.Module):
    """A mixture of experts whose experts live in ``source``. ``layer`` is their layer number there.

    ``mesh``: the ranks whose tokens make up the global batch, and how experts are spread over them; waiting for
    them is charged to ``ledger``.
    """

    def __init__(
        self,
        router: RouterConfig,
        shape: ExpertShape,
        source: ExpertSource,
        *,
        layer: int = 0,
        seed: int = 0,
        shared_d_ff: int = 0,
        save_activations: SaveActivations = SaveActivations.SAVE,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
    ) -> None:
        super().__init__()
        if shape.activation not in BUILT_IN_ACTIVATIONS:
            raise ValueError(f"a MoELayer does not support experts of {shape.activation}")
        self.shape = shape
        self.mesh = mesh
        self._charge: Charge | None = None
        if ledger is not None:
            self._charge = partial(ledger.stall, layer=layer, tier=Tier.RANKS, cause=Cause.ALL_TO_ALL)
        self.layer = layer
        self.save_activations = SaveActivations(save_activations)
        data = None if mesh is None else mesh.data
        self.router = Router(router, shape.d_model, layer=layer, seed=seed, data=data, charge=self._charge)
        self.shared: FeedForward | None = None
        if shared_d_ff:
            shared = ExpertShape(shape.d_model, shared_d_ff, shape.activation)
            tensor = TensorRanks(None if mesh is None else mesh.tensor, layer=layer, ledger=ledger)
            self.shared = FeedForward(shared, seed=seed, name=f"shared.{layer}", tensor=tensor)
        self._source = source

    def forward(self, x_TD: Tensor, key: NoiseKey) -> tuple[Tensor, Routing]:
        """``(T, D)`` to ``(T, D)`` in the type of ``x_TD``, and the routing (for its losses and loads)."""
        routing = self.router(x_TD, key)
        plan = dispatch(routing.expert_TK, routing.own_load_E)
        plan, rows = rows_to(self._source, plan, routing.load_RE, self.mesh, self._charge)
        call = ExpertPass(
            self.layer, self.shape, self._source, plan, rows, Weighting.BY_EXPERT, self.save_activations
        )
        y_TD = compute_experts(x_TD, routing.weight_TK, call)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD, routing

    @property
    def source(self) -> ExpertSource:
        """Where the experts come from."""
        return self._source
