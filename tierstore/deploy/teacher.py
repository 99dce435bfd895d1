"""A stored model that only answers: its logits for windows of tokens, and what its experts are asked for.

Shapes: B windows, T tokens of each, V vocabulary, N tokens of a pass, D width, K experts of a token.

Its experts come from their tiers, within a budget; its dense parameters are whole in memory, without gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tierstore._native import HugePages
from tierstore.dense import DenseConfig, unit_layouts
from tierstore.dense.frozen import load_frozen
from tierstore.errors import StoreMissingError
from tierstore.hf.experts import experts_modules
from tierstore.hf.model import HfModel
from tierstore.hf.spec import HfSpec
from tierstore.hf.stored import stored_spec
from tierstore.moe.source import ExpertLease, SourceSlot
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.prefetch import unit_schedule
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.predictor import PredictorName, make_predictor
from tierstore.stats import StallLedger
from tierstore.store.config import StoreConfig
from tierstore.store.opening import minimum_host_budget, read_schemas
from tierstore.store.parameter_store import ParameterStore
from tierstore.tiers.device import WeightLoads
from tierstore.tiers.opening import open_device_tier
from tierstore.tiers.slots import DeviceSlots
from tierstore.train.config import FinetuneConfig
from tierstore.train.experts import expert_key

#: Called before a layer's experts compute: the layer, tokens (N, D), their experts (N, K) and weights (N, K).
Routed = Callable[[int, Tensor, Tensor, Tensor], None]

_WEIGHT_SLOTS = 3


class Teacher:
    """An open model; ``open_teacher`` makes it. One thread at a time."""

    def __init__(self, model: HfModel, experts: FrozenExperts, spec: HfSpec) -> None:
        self._model = model
        self._experts = experts
        self.spec = spec

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """(B, T, V), in the type that the model computes in. Raises ChecksumError, OSError."""
        self._experts.begin_evaluation()
        self._model.begin_forward()
        logits: Tensor = self._model.module(input_ids=tokens_BT, use_cache=False).logits
        return logits

    def leases(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` (ascending) beside a pass; run it to its end."""
        return self._experts.forward(layer, experts)

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
def open_teacher(store: Path, *, host_budget: int) -> Iterator[Teacher]:
    """The model of the frozen ``store`` of one rank, on the CPU; experts take ``host_budget`` bytes, or the least they need.

    Raises StoreMissingError, StoreError, OSError.
    """
    spec = stored_spec(store, FinetuneConfig())
    if spec is None:
        raise StoreMissingError(f"{store}: no imported model")
    device, ledger, slot = torch.device("cpu"), StallLedger(), SourceSlot()
    model = cast(HfModel, spec.build(slot, ledger=ledger))
    model.module.eval()
    units = model.dense_units()
    layouts = unit_layouts(units, ranks=1, narrow=model.cast_parameters(), fusion=spec.manifest.fusion)
    compute = spec.compute_dtype.torch
    slots = DeviceSlots(spec.expert_shape.numel, compute, weights=_WEIGHT_SLOTS, gradients=0)
    cache = max(minimum_host_budget(read_schemas(store)), host_budget - slots.nbytes)
    prefetch = PrefetchConfig(predictor=PredictorName.ALL)
    config = StoreConfig(host_budget=cache, lookahead=int(cache * prefetch.budget), layers=spec.moe_layers)
    with ParameterStore.open(store, config) as opened, contextlib.ExitStack() as stack:
        core = opened.core
        load_frozen(core, units, layouts, group=Mesh.alone(RankEnvironment(), device).world, device=device)
        model.load_state(core.committer.state)
        tier = open_device_tier(core.engine, slots, device, HugePages.AUTO, WeightLoads.IN_PLACE)
        stack.callback(tier.close)
        experts = FrozenExperts(
            core,
            tier,
            {
                layer: {expert: core.record(expert_key(layer, expert)) for expert in range(spec.experts)}
                for layer in spec.moe_layers
            },
            weight_slots=_WEIGHT_SLOTS,
            predictor=make_predictor(prefetch.predictor, range(spec.experts), most=prefetch.guesses),
            schedule=unit_schedule(
                layouts, DenseConfig(), prefetch, moe_layers=spec.moe_layers, compute=compute
            ),
            ledger=ledger,
        )
        slot.target = experts
        yield Teacher(model, experts, spec)
