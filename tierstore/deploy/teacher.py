"""A stored model that only answers: its logits for windows of tokens, and what its experts are asked for.

Shapes: B windows, T tokens of each, V vocabulary, N tokens of a pass, D width, K experts of a token.

It is served as ``tierstore serve`` serves it: its experts come from their tiers, within a budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tierstore.hf.experts import experts_modules
from tierstore.hf.model import HfModel
from tierstore.moe.source import ExpertLease
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts.interface import ServingPhase
from tierstore.serve.opening import ServedParts, open_served

#: Called before a layer's experts compute: the layer, tokens (N, D), their experts (N, K) and weights (N, K).
Routed = Callable[[int, Tensor, Tensor, Tensor], None]


class Teacher:
    """An open model; ``open_teacher`` makes it. One thread at a time."""

    def __init__(self, parts: ServedParts) -> None:
        self._parts = parts
        self._model = cast(HfModel, parts.model)
        self.spec = parts.spec

    @property
    def parts(self) -> ServedParts:
        """What it is made of."""
        return self._parts

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """(B, T, V), in the type that the model computes in. Raises ChecksumError, OSError."""
        self._parts.experts.begin(ServingPhase.PREFILL, tokens_BT.numel())
        self._model.begin_forward()
        logits: Tensor = self._model.module(input_ids=tokens_BT, use_cache=False).logits
        return logits

    def leases(self, experts: Sequence[int]) -> Iterator[tuple[int, Iterator[ExpertLease]]]:
        """A pass of its own: each layer, and leases of its ``experts`` (ascending); run each to its end."""
        self._parts.experts.begin(ServingPhase.PREFILL, 1)
        for layer in self.spec.moe_layers:
            yield layer, self._parts.experts.forward(layer, experts)

    @contextlib.contextmanager
    def watched(self, routed: Routed) -> Iterator[None]:
        """Within the block ``routed`` hears of every layer's tokens, before its experts are leased."""
        module: Any = self._model.module
        with contextlib.ExitStack() as stack:
            for layer, experts in experts_modules(module):

                def heard(_: object, inputs: tuple[Tensor, Tensor, Tensor], layer: int = layer) -> None:
                    x_ND, expert_NK, weight_NK = inputs
                    routed(layer, x_ND, expert_NK, weight_NK)

                stack.callback(experts.register_forward_pre_hook(heard).remove)
            yield


@contextlib.contextmanager
def open_teacher(store: Path, *, host_budget: int, threads: int = 0) -> Iterator[Teacher]:
    """The model that was imported into ``store``, of one rank, on the CPU; its experts take ``host_budget`` bytes.

    Raises StoreMissingError, StoreError, BudgetError, OSError.
    """
    config = ServeConfig(
        store=store,
        device="cpu",
        host_budget=host_budget,
        threads=threads,
        prefetch=PrefetchConfig(predictor=PredictorName.ALL),
    )
    with open_served(config) as parts:
        yield Teacher(parts)
