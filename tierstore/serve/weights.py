"""What a served model is made of: its specification by what the store says, and its dense parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tierstore.config import from_dict
from tierstore.dense import Fusion, unit_layouts
from tierstore.dense.parameters import load_frozen
from tierstore.errors import ConfigError, StoreError, StoreFormatError
from tierstore.hf.stored import stored_spec
from tierstore.model.config import ModelConfig
from tierstore.model.interface import Model
from tierstore.model.spec import ModelSpec
from tierstore.model.store_schema import TrainState
from tierstore.moe.lora import LoraConfig
from tierstore.parallel import RankGroup
from tierstore.prefetch.walking import RecordsByExpert
from tierstore.store.core import StoreCore
from tierstore.train.config import FinetuneConfig


def served_spec(store: Path, state: TrainState) -> ModelSpec:
    """The model in ``store``: the one that was imported, with the pairs that were trained beside it, or the built-in one
    that was trained. Raises ConfigError for a store of several ranks, StoreFormatError where the conditions are damaged.
    """
    model = _conditions(store, state).get("model", {})  # an import leaves it to the first run
    if not isinstance(model, Mapping):
        raise StoreFormatError(f"{store}: the conditions of the run are damaged: model: {model!r}")
    imported = stored_spec(store, FinetuneConfig(), served_lora(store, state))
    return imported if imported is not None else from_dict(ModelConfig, model, origin=str(store))


def served_lora(store: Path, state: TrainState) -> LoraConfig:
    """The pairs that were trained beside the model in ``store``; none are where its rank is 0."""
    model = _conditions(store, state).get("model", {})
    given = model.get("lora") if isinstance(model, Mapping) else None
    return from_dict(LoraConfig, given, origin=str(store)) if isinstance(given, Mapping) else LoraConfig()


def served_records(spec: ModelSpec, store: StoreCore, key: Callable[[int, int], str]) -> RecordsByExpert:
    """The records called ``key(layer, expert)`` of all experts of ``spec``. Raises StoreError for one that is missing."""
    try:
        return {
            layer: {expert: store.record(key(layer, expert)) for expert in range(spec.experts)}
            for layer in spec.moe_layers
        }
    except KeyError as error:
        raise StoreError(f"{store.directory}: record {error.args[0]!r} is missing") from error


def load_dense(
    store: StoreCore, model: Model, state: TrainState, *, compute: torch.dtype, device: torch.device
) -> None:
    """Reads the dense parameters of ``model``, each unit once, in the types that passes need, and what it keeps beside them.

    Raises StoreError, ChecksumError, OSError.
    """
    conditions = _conditions(store.directory, state)
    try:
        fusion = Fusion(conditions["dense"]["fusion"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreFormatError(
            f"{store.directory}: the conditions of the run are damaged: {error}"
        ) from error
    narrow = model.cast_parameters()
    # With pairs on attention: what is frozen, and the pairs, as records of their own.
    for units in (model.frozen_units(), model.dense_units()):
        layouts = unit_layouts(units, ranks=1, narrow=narrow, fusion=fusion)
        load_frozen(
            store, units, layouts, group=RankGroup.alone(), device=device, narrow=narrow, compute=compute
        )
    model.module.to(device)  # buffers
    model.load_state(store.committer.state)


def _conditions(store: Path, state: TrainState) -> dict[str, Any]:
    if state.ranks > 1:
        raise ConfigError(
            f"{store}: made by {state.ranks} ranks: tierstore deploy, or tierstore reshard, makes one store of it"
        )
    return state.conditions
