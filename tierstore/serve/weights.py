"""What a served model is made of: its specification by what the store says, and its dense parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tierstore.config import from_dict
from tierstore.dense import Fusion, unit_layouts
from tierstore.dense.frozen import load_frozen
from tierstore.errors import ConfigError, StoreFormatError
from tierstore.hf.stored import stored_spec
from tierstore.model.config import ModelConfig
from tierstore.model.interface import Model
from tierstore.model.spec import ModelSpec
from tierstore.parallel import RankGroup
from tierstore.store.core import StoreCore
from tierstore.train.config import FinetuneConfig
from tierstore.train.state import TrainState


def served_spec(store: Path, state: TrainState) -> ModelSpec:
    """The model in ``store``: the one that was imported, or the built-in one that was trained.

    Raises ConfigError where adapters were trained beside it, StoreFormatError where the conditions are damaged.
    """
    model = _conditions(store, state).get("model", {})  # an import leaves it to the first run
    if not isinstance(model, Mapping):
        raise StoreFormatError(f"{store}: the conditions of the run are damaged: model: {model!r}")
    if model.get("lora"):
        raise ConfigError(
            f"{store}: LoRA pairs were trained beside this model: tierstore deploy merges them into what it makes to serve"
        )
    imported = stored_spec(store, FinetuneConfig())
    return imported if imported is not None else from_dict(ModelConfig, model, origin=str(store))


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
    units, narrow = model.dense_units(), model.cast_parameters()
    layouts = unit_layouts(units, ranks=1, narrow=narrow, fusion=fusion)
    load_frozen(store, units, layouts, group=RankGroup.alone(), device=device, narrow=narrow, compute=compute)
    model.module.to(device)  # buffers
    model.load_state(store.committer.state)


def _conditions(store: Path, state: TrainState) -> dict[str, Any]:
    if state.ranks > 1:
        raise ConfigError(
            f"{store}: made by {state.ranks} ranks: tierstore deploy, or tierstore reshard, makes one store of it"
        )
    return state.conditions
