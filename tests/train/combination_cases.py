"""How each feature of ``tierstore.train.combinations`` is switched on in a tiny run, and what such a run comes to."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rank_cases import TINY

from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.hf.manifest import Weights
from tierstore.hf.spec import stored_spec
from tierstore.model.store_schema import expert_key
from tierstore.parallel import ExchangeMode, Mesh
from tierstore.store.format import MomentFormat
from tierstore.train.combinations import Feature
from tierstore.train.config import FinetuneConfig, TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.session import open_session
from tierstore.train.stored_model import open_stored

STEPS = 3
Arrays = dict[str, npt.NDArray[np.generic]]

#: What a run needs in any case: several micro-batches, rows and heads for four ranks, and evictions.
BASE: Mapping[str, Any] = {
    **TINY,
    "host_budget": 200_000,
    "model.experts": 8,
    "data.batch_size": 4,
    "data.micro_batches": 2,
    "data.format": "bytes",
    "finetune.seq_len": 8,
    "finetune.aux_loss_weight": 0.0,
    "clip_norm": 0.5,
    # What is auto would choose by itself.
    "parallel.pipeline_degree": 1,
    "parallel.exchange": "flat",
    "parallel.embedding": "gathered",
    "parallel.head": "gathered",
}

#: What changes the work that is done. The reference has it, too.
WORK: Mapping[Feature, Mapping[str, Any]] = {
    Feature.TASKS: {"tasks.code.rows": 3, "tasks.prose.weight": 2.0},
    Feature.LORA: {"lora.rank": 2},
    Feature.NARROW: {"adamw.moments": "int8"},
    Feature.WRAPPED: {},
}

#: What changes only how it is done. The reference does without.
MANNER: Mapping[Feature, Mapping[str, Any]] = {
    Feature.LAYER_MAJOR: {"data.micro_order": "layer"},
    Feature.CHUNKS: {"parallel.pipeline_degree": 2},
    Feature.STAGES: {},
    Feature.TENSOR: {},
    Feature.HIERARCHICAL: {},
    Feature.EMBEDDING: {"parallel.embedding": "partitioned", "parallel.head": "partitioned"},
}

#: How ranks are laid out for it, as ``ParallelConfig`` has it.
LAID_OUT: Mapping[Feature, Mapping[str, Any]] = {
    Feature.STAGES: {"stages": 2},
    Feature.TENSOR: {"tensor": 2},
    Feature.HIERARCHICAL: {"exchange": ExchangeMode.HIERARCHICAL, "node_ranks": 2},
}


class Outcome(NamedTuple):
    """What a run came to: losses, the checksum of this rank's records; or why it was refused, and whether its store was
    touched.
    """

    losses: list[float]
    crc: int
    refused: str
    touched: bool


def imported(features: frozenset[Feature]) -> bool:
    """Whether the model of such a run comes from transformers."""
    return bool(features & {Feature.LORA, Feature.WRAPPED})


def settings_of(features: frozenset[Feature], *, parallel: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The configuration of a run with ``features`` over ``text``, by dotted names."""
    merged = {**BASE, "data.paths": (text,)}
    for feature in features:
        merged |= {**WORK, **MANNER}[feature]
    if imported(features):
        merged = {name: value for name, value in merged.items() if not name.startswith("model.")}
    if Feature.TASKS in features:
        for name in ("paths", "format"):
            each = merged.pop(f"data.{name}")
            merged |= {f"tasks.{task}.{name}": each for task in ("code", "prose")}
    return merged | {f"parallel.{name}": value for name, value in parallel.items()}


def together(features: Iterable[Feature]) -> tuple[int, dict[str, Any]]:
    """So many ranks, laid out for all of ``features``: two data ranks, or two nodes of two, in each of two stages, of two
    tensor ranks.
    """
    parallel: dict[str, Any] = {}
    for feature in features:
        parallel |= LAID_OUT.get(feature, {})
    data = 4 if "node_ranks" in parallel else 2
    if "node_ranks" in parallel and "tensor" in parallel:
        return 4, {**parallel, "tensor": 4}  # only to be refused
    return data * parallel.get("stages", 1) * parallel.get("tensor", 1), parallel


def train_features(
    mesh: Mesh, store: Path, settings: Mapping[str, Any], features: frozenset[Feature], model: Path
) -> tuple[list[float], int, str, bool]:
    """``STEPS`` steps into ``store``: an ``Outcome``. ``model`` is the checkpoint of an imported one."""
    opening, losses = Opening.CREATE, []
    try:
        config = load(TrainConfig, None, {**settings, "store": store})
        if imported(features):
            frozen = Weights.FROZEN if Feature.LORA in features else Weights.TRAINABLE
            moments = MomentFormat.FP32 if Feature.LORA in features else config.adamw.moments
            options = ImportOptions(weights=frozen, moments=moments)
            if mesh.tensor.size == mesh.stages == 1:
                import_model(model, store, options, mesh=mesh)
            else:
                _import_for(mesh, model, store, options)
            spec = stored_spec(store, config.finetune, config.lora)
            assert spec is not None
            config, opening = replace(config, model=spec), Opening.RESUME
        with open_session(config, opening, mesh=mesh) as trainer:
            while trainer.state.position < STEPS:
                losses.append(trainer.step().loss)
            trainer.commit()
            crc = trainer.store.records_crc32c()
    except ConfigError as error:
        return losses, 0, str(error), store.exists() and not imported(features)
    return losses, crc, "", True


def _import_for(mesh: Mesh, model: Path, store: Path, options: ImportOptions) -> None:
    """Imports in one process, and makes that store over for tensor-parallel ranks or pipeline stages."""
    if mesh.world.rank == 0:
        whole = store.with_name(f"{store.name}-whole")
        import_model(model, whole, options)
        reshard(whole, store, mesh.layout, model=stored_spec(whole))
    mesh.world.barrier()


def logical(store: Path) -> Arrays:
    """All dense parameters and experts of ``store``, with their moments, whatever ranks hold them."""
    found: Arrays = {}
    with open_stored(store, stored_spec(store, FinetuneConfig(seq_len=8))) as stored:
        for number, (name, _) in enumerate(stored.groups):
            for section, whole in enumerate(stored.group(number)):
                for index, parameter in enumerate(whole):
                    found[f"{name}/{section}/{index}"] = parameter.numpy().copy()
        for layer in stored.model.moe_layers:
            for key, sections, _ in stored.experts(
                expert_key(layer, expert) for expert in range(stored.model.experts)
            ):
                for section, array in enumerate(sections):
                    found[f"{key}/{section}"] = array.copy()
    return found
