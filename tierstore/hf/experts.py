"""Experts of a transformers module: computed from leased weights, and balanced by the family's own method.

Shapes: T tokens, K experts a token, E experts of a layer, D width of the model, F width of an expert.

transformers keeps a layer's experts in one module, called with the tokens, the experts that each was routed to and
their weights, and lets other packages compute it. Here the module has no parameters: an :class:`ExpertLayer` bound to it
leases each expert from an :class:`~tierstore.moe.source.ExpertSource`. The results, and the gradients, have the
bits of transformers' own ``grouped_mm`` on a CPU.

An auxiliary loss or a bias on the choice balances them; families with neither (DeepSeek-V2) are not balanced. Padding
takes no part: as in transformers with an attention mask.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tierstore.accelerator import read
from tierstore.errors import ConfigError
from tierstore.hf.families import ACTIVATIONS
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import Activation, ExpertShape, SaveActivations
from tierstore.moe.dispatch import Dispatch, RowOrder, count_experts, dispatch, dispatch_token
from tierstore.moe.exchange import LocalRows, Rows, gather_counts
from tierstore.moe.source import ExpertSource, rows_to
from tierstore.parallel import Mesh, RankGroup
from tierstore.parallel.collectives import Charge
from tierstore.stats import Cause, StallLedger, Tier

#: The name under which transformers knows the implementation (``experts_implementation``).
IMPLEMENTATION = "tierstore"

#: The attribute of an experts module that holds its layer.
_BOUND = "tierstore_layer"


class ExpertLoads:
    """How many assignments each expert got in the last forward pass, by layer, from all ranks: int64 (E,). Those of padding
    are not counted, nor is a pass of a single token without gradients (decoding).

    A layer that is computed again, by gradient checkpointing, is counted once.
    """

    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}
        #: bool: the pass's tokens that are no padding (None: all).
        self.mask_T: Tensor | None = None

    def begin(self, mask_BT: Tensor | None = None) -> None:
        """A forward pass begins; its tokens are laid out as in ``mask_BT``."""
        self.by_layer, self.mask_T = {}, None if mask_BT is None else mask_BT.flatten()

    def counted(self, expert_TK: Tensor, padding: int) -> Tensor:
        """``expert_TK``, with ``padding`` as the expert of each assignment of padding."""
        return expert_TK if self.mask_T is None else expert_TK.masked_fill(~self.mask_T.unsqueeze(1), padding)

    def all(self) -> tuple[Tensor, ...]:
        """In the order of layers."""
        return tuple(self.by_layer[layer] for layer in sorted(self.by_layer))


class ExpertLayer:
    """Computes the experts of decoder layer ``layer``."""

    def __init__(
        self,
        layer: int,
        shape: ExpertShape,
        experts: int,
        source: ExpertSource,
        *,
        loads: ExpertLoads,
        save: SaveActivations = SaveActivations.SAVE,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
    ) -> None:
        """``mesh``: the ranks whose tokens make up the global batch, and how experts are spread over them."""
        self.layer = layer
        self.shape = shape
        self.experts = experts
        self.source = source
        self.save = SaveActivations(save)
        self._loads = loads
        self._mesh = mesh
        self._charge: Charge | None = None
        if ledger is not None:
            self._charge = partial(ledger.stall, layer=layer, tier=Tier.RANKS, cause=Cause.ALL_TO_ALL)

    def __call__(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """``(T, D)`` to ``(T, D)``. On several ranks a collective. Raises PeerError."""
        here = self._all_here
        if here and x_TD.shape[0] == 1 and not torch.is_grad_enabled():
            plan = dispatch_token(expert_TK, self.experts)
            return self._computed(x_TD, weight_TK, plan, LocalRows(plan, plan.experts))
        own_E, load_RE, load_E = self._loads_of(expert_TK)
        # Tensor-parallel ranks have the same tokens and sort them in the same order.
        together = self._mesh is not None and self._mesh.data.size > 1
        plan = dispatch(expert_TK, own_E, RowOrder.TOKENS if together else RowOrder.SORTED)
        self._loads.by_layer[self.layer] = load_E
        # Rows of padding are computed as others are.
        plan, rows = rows_to(self.source, plan, load_RE, self._mesh, self._charge)
        return self._computed(x_TD, weight_TK, plan, rows)

    @property
    def _all_here(self) -> bool:
        """Whether this rank computes every expert, for its own tokens alone."""
        mesh = self._mesh
        return mesh is None or (mesh.data.size == 1 and mesh.tensor.size == 1)

    def _computed(self, x_TD: Tensor, weight_TK: Tensor, plan: Dispatch, rows: Rows) -> Tensor:
        call = ExpertPass(self.layer, self.shape, self.source, plan, rows, Weighting.BY_OUTPUT, self.save)
        return compute_experts(x_TD, weight_TK, call)

    def _loads_of(self, expert_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Assignments of this rank (E,), of each data rank (R, E), and of all without those of padding (E,); on the host,
        which waits for the device here alone. Raises ValueError for an expert that is none of them.
        """
        experts = self.experts
        # One more count: assignments of padding, and of experts that do not exist.
        each_TK = expert_TK.clamp(max=experts)
        own_N = counted_N = count_experts(each_TK.reshape(-1), experts + 1)
        if (counted_TK := self._loads.counted(each_TK, experts)) is not each_TK:
            counted_N = count_experts(counted_TK.reshape(-1), experts + 1)
        both_N = torch.cat([own_N, counted_N])
        if self._mesh is not None and not self._all_here:
            # A collective on every rank, with or without padding: this rank cannot know whether another has any.
            data = self._mesh.data
            found_RN, rank = data.read(gather_counts(both_N, data, self._charge)), data.rank
        else:
            (found_RN,), rank = read(both_N.unsqueeze(0)), 0
        load_RE, counted_RE = found_RN[:, :experts], found_RN[:, experts + 1 : -1]
        if found_RN[rank, experts]:
            raise ValueError(f"layer {self.layer}: routed to expert {int(expert_TK.max())} of {experts}")
        return load_RE[rank], load_RE, counted_RE.sum(dim=0)


def compute_bound(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts implementation: computes ``module`` by the layer that is bound to it."""
    layer: ExpertLayer | None = getattr(module, _BOUND, None)
    if layer is None:
        raise RuntimeError(
            f"{type(module).__name__}: no experts are bound to this module; load its model with tierstore.hf"
        )
    return layer(hidden_states, top_k_index, top_k_weights)


def register() -> None:
    """Registers the implementation with transformers. Repeated calls have no further effect."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_bound)


def bind(module: nn.Module, layer: ExpertLayer) -> None:
    """Binds ``layer`` to ``module``, which must have no parameters: ``layer`` computes it from now on."""
    setattr(module, _BOUND, layer)


def bound(module: nn.Module) -> ExpertLayer | None:
    """The layer bound to ``module``; None if none is."""
    return getattr(module, _BOUND, None)


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A causal language model of transformers; ``experts_at`` are its experts modules, by decoder layer, which have no
    parameters. Each has ``experts`` experts of ``shape``. ``layers``: the decoder layers that are here, of ``count``.
    """

    module: Any
    experts_at: dict[int, nn.Module]
    experts: int
    shape: ExpertShape
    layers: range
    count: int

    @property
    def begins(self) -> bool:
        """Whether the embedding is here."""
        return self.layers.start == 0

    @property
    def ends(self) -> bool:
        """Whether norm and head are here."""
        return self.layers.stop == self.count


def experts_modules(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Every experts module of ``model``, with the number of its decoder layer. Raises ConfigError."""
    for name, module in model.named_modules():
        if "_apply_gate" in vars(type(module)):  # which transformers' experts interface adds
            found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
            if found is None:
                raise ConfigError(f"{name}: experts outside of a decoder layer are not supported")
            yield int(found[1]), module


def found_experts(model: nn.Module, *, where: str) -> tuple[dict[int, nn.Module], ExpertShape, int]:
    """The experts modules of ``model``, which still have their parameters, by decoder layer; the shape of an expert; and
    their number in a layer. Raises ConfigError naming ``where`` and what is not supported.
    """
    found: dict[int, nn.Module] = {}
    kinds: set[tuple[ExpertShape, int]] = set()
    for layer, experts in experts_modules(model):
        if layer in found:
            raise ConfigError(f"{where}: layer {layer} has two sets of experts")
        found[layer] = experts
        each: Any = experts
        kinds.add((expert_shape_of(each), int(each.num_experts)))
    if not kinds:
        raise ConfigError(f"{where}: no layer of this model has experts")
    if len(kinds) > 1:
        sizes = sorted((count, shape.d_ff, shape.d_model) for shape, count in kinds)
        raise ConfigError(f"{where}: expected experts of one shape in all layers, found {sizes}")
    ((shape, count),) = kinds
    return dict(sorted(found.items())), shape, count


def expert_shape_of(module: Any) -> ExpertShape:
    """The shape of one expert of an experts module, which still has its parameters (on any device).

    Raises ConfigError naming the feature that is not supported.
    """
    name = type(module).__name__
    if not module.has_gate:
        raise ConfigError(f"{name}: experts without a gate are not supported")
    if module.has_post_expert_norm:
        raise ConfigError(f"{name}: a norm after each expert is not supported")
    fused = dict(module.named_parameters())
    if module.has_bias or module.is_transposed or not module.is_concatenated:
        # gpt-oss: all three at once, and a gate of its own.
        if not (
            module.has_bias
            and module.is_transposed
            and not module.is_concatenated
            and hasattr(module, "alpha")
            and hasattr(module, "limit")
        ):
            raise ConfigError(f"{name}: this layout of experts is not supported")
        _, d_ff, d_model = fused["down_proj"].shape
        shape = ExpertShape(
            d_model, d_ff, Activation.CLAMPED_SWIGLU, alpha=float(module.alpha), limit=float(module.limit)
        )
    else:
        if not type(module)._apply_gate.__module__.startswith("transformers.integrations."):
            raise ConfigError(f"{name}: a gate of its own is not supported")
        _, d_model, d_ff = fused["down_proj"].shape
        shape = ExpertShape(d_model, d_ff, _activation_of(module))
    numel = sum(parameter[0].numel() for parameter in fused.values())
    if numel != shape.numel:
        found = ", ".join(f"{key} {tuple(value.shape)}" for key, value in fused.items())
        raise ConfigError(f"{name}: expected experts of {shape.numel} parameters, found {found}")
    return shape


def _activation_of(module: Any) -> Activation:
    from transformers.activations import ACT2FN

    name = getattr(module.config, "hidden_act", None)
    activation = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None or type(module.act_fn) is not type(ACT2FN[name]):
        raise ConfigError(f"hidden_act: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return activation


# Balance ----------------------------------------------------------------------------------------------------


class AuxLoss:
    """The auxiliary loss of ``loaded`` over the global batch of ``ranks``, by transformers' own function of the family.

    ``weight``: None is that of its configuration; 0 for a family without such a loss.
    """

    def __init__(self, loaded: LoadedModule, weight: float | None, ranks: RankGroup) -> None:
        module = loaded.module
        own = getattr(module, "router_aux_loss_coef", None)
        self.weight = 0.0
        if own is not None:
            self.weight = float(own if weight is None else weight)
        self._ranks = ranks
        #: The outputs of routers in the current forward pass, by layer; None if it is not recorded.
        self.under_way: dict[int, Tensor] | None = None
        self._recorded: tuple[Tensor, ...] = ()
        if self.weight:
            #: Experts of a layer.
            self.experts = int(module.num_experts)
            # Hooks of the module refer to this object, which therefore holds neither the module nor, between passes, a
            # graph: a cycle would keep their memory until a collection.
            self._top_k = module.num_experts_per_tok
            self._function: Any = vars(sys.modules[type(module).__module__])["load_balancing_loss_func"]
            for layer, router in routers_of(loaded):
                router.register_forward_hook(partial(self._record, layer))

    def _record(self, layer: int, router: nn.Module, arguments: Any, output: Any) -> None:
        """A hook of the router of ``layer``."""
        if self.under_way is not None:  # not when a layer is computed again
            self.under_way[layer] = output[0]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Takes what the routers give in the forward pass within, for ``value``."""
        # transformers' own output_router_logits is not used: its loss fails with masks for packed documents.
        logits: dict[int, Tensor] = {}
        self.under_way = logits
        try:
            yield
        finally:
            self.under_way = None
        self._recorded = tuple(logits[layer] for layer in sorted(logits))

    def value(self, mask_BT: Tensor | None) -> Tensor:
        """This rank's share of the loss of the last forward pass that was recorded, unweighted; ``mask_BT`` is that of its
        batch. A collective.
        """
        if self._ranks.size == 1:
            logits, self._recorded = self._recorded, ()
            loss: Tensor = self._function(logits, self.experts, self._top_k, mask_BT)
            return loss
        return balance_loss(*self.sums(mask_BT))

    def sums(self, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """The contribution of this stage's layers to the loss, from the last recorded forward pass: ``counts``, int64
        (E + 1), assignments of each expert and rows, of all layers and data ranks; ``probability_E``, fp32, the sum of this
        rank's probabilities, with its graph. A collective.
        """
        experts, logits, self._recorded = self.experts, self._recorded, ()
        mask_T = None if mask_BT is None else mask_BT.flatten()
        rows = logits[0].shape[0] if mask_T is None else int(mask_T.sum())
        count_E = torch.zeros(experts, dtype=torch.int64, device=logits[0].device)
        probability_E = torch.zeros(experts, device=logits[0].device)
        for logits_TE in logits:
            routed_TE = logits_TE.softmax(dim=-1)
            chosen_TK = routed_TE.topk(self._top_k, dim=-1).indices
            wide_TE = routed_TE.float()
            if mask_T is not None:
                chosen_TK = chosen_TK.masked_fill(~mask_T.unsqueeze(1), experts)
                wide_TE = wide_TE * mask_T.float().unsqueeze(-1)
            count_E += count_experts(chosen_TK.flatten(), experts + 1)[:-1]
            probability_E = probability_E + wide_TE.sum(dim=0)
        # Parts of a batch of tasks may have different numbers of rows.
        rows_1 = count_E.new_tensor([rows * len(logits)])
        counts = torch.cat([count_E, rows_1])
        if self._ranks.size > 1:
            counts = gather_counts(counts, self._ranks).sum(dim=0)
        return counts, probability_E


def balance_loss(counts: Tensor, probability_E: Tensor) -> Tensor:
    """The auxiliary loss, or a share of it, with the operations of transformers' own.

    It is ``E * sum_e f_e * m_e`` over all layers and ranks, with ``f_e`` the part of the tokens that e got, which carries
    no gradient, and ``m_e`` its mean probability. ``m_e`` is linear in tokens and layers, so each rank or stage
    contributes the sum of its own probabilities, beside the ``counts`` of all (``AuxLoss.sums``).
    """
    rows = int(counts[-1])
    part_E = counts[:-1].to(probability_E) / rows
    share: Tensor = torch.sum(part_E * (probability_E / rows).unsqueeze(0)) * probability_E.numel()
    return share


def balance_loss_later(counts: Tensor, probability_E: Tensor) -> Tensor:
    """The same for the layers of a stage before the last, whose ``counts`` are known when the backward pass begins: a zero
    until then (not finite if a probability is not), with the gradient of the loss.
    """
    apply: Any = _Later.apply
    later: Tensor = apply(probability_E, counts)
    return later


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probability_E: Tensor, counts: Tensor) -> Tensor:
        ctx.counts, ctx.like = counts, torch.zeros_like(probability_E)
        return probability_E.sum() * 0.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            # Linear: its gradient is the same wherever it is taken.
            anywhere = ctx.like.requires_grad_()
            loss = balance_loss(ctx.counts.to(anywhere.device), anywhere)
        return torch.autograd.grad(loss, anywhere, gradient)[0], None


def routers_of(loaded: LoadedModule) -> Iterator[tuple[int, nn.Module]]:
    """The router of every layer of experts. Raises ConfigError where there is none beside the experts."""
    layers = {id(experts): layer for layer, experts in loaded.experts_at.items()}
    for name, block in loaded.module.named_modules():
        layer = layers.get(id(getattr(block, "experts", None)))
        if layer is not None:
            router = getattr(block, "gate", None) or getattr(block, "router", None)
            if not isinstance(router, nn.Module):
                raise ConfigError(f"{name}: no router beside the experts")
            yield layer, router


class BiasBalance:
    """The biases on the choice of experts of ``module``, by which families without an auxiliary loss balance them.

    After a step, ``bias += speed * sign(mean load - load)`` (DeepSeek-V3 technical report, section 2.1.2); loads are
    those of all micro-batches and ranks.
    """

    def __init__(self, module: nn.Module, speed: float) -> None:
        self._biases = [
            value for name, value in module.named_buffers() if name.endswith("e_score_correction_bias")
        ]
        self._speed = speed
        self._loads: list[Tensor] | None = None

    def begin_step(self) -> None:
        """Clears the counts."""
        self._loads = None

    def count(self, loads: Sequence[Tensor]) -> None:
        """Adds the loads of a forward pass, one for each layer of experts."""
        if self._biases and self._speed:
            if len(loads) != len(self._biases):
                raise RuntimeError(f"{len(loads)} layers of experts were reached, of {len(self._biases)}")
            held = self._loads
            self._loads = list(loads) if held is None else [a + b for a, b in zip(held, loads, strict=True)]

    @torch.no_grad()
    def update(self) -> None:
        """Updates the biases after an optimizer step."""
        if self._loads is not None:
            for bias, load in zip(self._biases, self._loads, strict=True):
                # Integer arithmetic: both the mean load and the load are multiplied by the number of experts.
                direction = torch.sign(load.sum() - load * load.numel())
                bias.add_(direction.to(bias), alpha=self._speed)
        self._loads = None
