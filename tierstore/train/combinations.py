"""The ways to train that can be combined: one table, and the check that refuses the rest.

Every pair of ``Feature`` has a ``Pairing``: the run has the same bits as one on the plain layout (the same model, tasks
and moments; data and expert parallelism only; micro order), or differs from it by rounding within a stated tolerance, or
is refused with a reason. ``docs/PARALLEL.md`` shows this table, ``tests/train/test_combinations.py`` runs every pair.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig
from tierstore.parallel.config import ExchangeMode, RowPlacement
from tierstore.parallel.layout import Layout
from tierstore.store.format import MomentFormat
from tierstore.train.config import TrainConfig


class Feature(Enum):
    """A way to train, in the order of the table."""

    LAYER_MAJOR = "layer-major micro-batches"
    CHUNKS = "chunked exchange (r > 1)"
    STAGES = "pipeline stages"
    TENSOR = "tensor parallelism"
    HIERARCHICAL = "hierarchical exchange"
    EMBEDDING = "partitioned embedding"
    TASKS = "elastic tasks"
    LORA = "LoRA"
    NARROW = "narrow moments"
    WRAPPED = "a transformers model"


class Compatibility(Enum):
    """How a pair of features affects a run."""

    BIT_EQUAL = "bit-equal"
    WITHIN = "within a tolerance"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Pairing:
    """The verdict on two features together, and why. ``tolerance``: relative, of losses, for WITHIN."""

    verdict: Compatibility
    why: str
    tolerance: float = 0.0


#: For losses of a few steps whose sums are taken in another order; weights differ by at most ten times as much.
_ROUNDING = 2e-5


def _equal(why: str) -> Pairing:
    return Pairing(Compatibility.BIT_EQUAL, why)


def _within(why: str) -> Pairing:
    return Pairing(Compatibility.WITHIN, why, _ROUNDING)


def _refused(why: str) -> Pairing:
    return Pairing(Compatibility.REFUSED, why)


_SUMS = "a layer's output is a sum of the ranks' parts, which rounds otherwise than one product"
_ROWS = "the owner of a table row sums its gradients in the order of tokens, not rank by rank"
_ASSIGNED = "the assignment of rows to ranks decides the order in which gradients are summed"
_ORDER = "the exchange delivers the same rows in the same order"
_WHOLE = "a chunk is a group of whole experts"
_KEYED = "rounding depends on a record's key and step alone"
_EXPERTS = "tensor-parallel ranks of an imported model share its experts alone, and exchange whole rows"
_PIECES = "a rank's rows are cut into the same pieces with and without"

_L, _C, _S, _T = Feature.LAYER_MAJOR, Feature.CHUNKS, Feature.STAGES, Feature.TENSOR
_H, _E, _K = Feature.HIERARCHICAL, Feature.EMBEDDING, Feature.TASKS
_A, _N, _W = Feature.LORA, Feature.NARROW, Feature.WRAPPED

_TABLE: Mapping[tuple[Feature, Feature], Pairing] = {
    (_L, _C): _equal(_WHOLE),
    (_L, _S): _refused(
        "1F1B begins a micro-batch's backward pass before the next one's forward pass, and layer order takes "
        "all micro-batches of a layer at once"
    ),
    (_L, _T): _within(_SUMS),
    (_L, _H): _equal(_ORDER),
    (_L, _E): _within(_ROWS),
    (_L, _K): _equal(_PIECES),
    (_L, _A): _equal("gradients of a pair are summed in the order of micro-batches"),
    (_L, _N): _equal(_KEYED),
    (_L, _W): _equal("blocks are recomputed from their inputs"),
    (_C, _S): _equal(_WHOLE),
    (_C, _T): _within(_SUMS),
    (_C, _H): _equal(_ORDER),
    (_C, _E): _within(_ROWS),
    (_C, _K): _equal(_PIECES),
    (_C, _A): _equal(_WHOLE),
    (_C, _N): _equal(_KEYED),
    (_C, _W): _equal(_WHOLE),
    (_S, _T): _within(_SUMS),
    (_S, _H): _equal(_ORDER),
    (_S, _E): _within(_ROWS),
    (_S, _K): _refused(
        "the last stage's loss is one mean over a micro-batch, but each task has a weight of its own"
    ),
    (_S, _A): _equal("a stage has the pairs of its own blocks"),
    (_S, _N): _equal(_KEYED),
    (_S, _W): _equal(
        "each stage runs the family's own code over its layers, and receives the router choices of the other stages"
    ),
    (_T, _H): _refused(
        "expert results return to all ranks of a tensor-parallel group, so there is no all-to-all to be done in "
        "two steps"
    ),
    (_T, _E): _within(_SUMS),
    (_T, _K): _within(_SUMS),
    (_T, _A): _equal(_EXPERTS),
    (_T, _N): _within(_SUMS),
    (_T, _W): _equal(_EXPERTS),
    (_H, _E): _within(_ROWS),
    (_H, _K): _equal(_PIECES),
    (_H, _A): _equal(_ORDER),
    (_H, _N): _equal(_ORDER),
    (_H, _W): _equal(_ORDER),
    (_E, _K): _refused(
        "ranks' pieces differ in tokens, but a divided table takes equally many from each, at one weight"
    ),
    (_E, _A): _refused("with LoRA the embedding is frozen and stays whole on each rank"),
    (_E, _N): _within(_ROWS),
    (_E, _W): _refused("only the built-in model's embedding and head can be divided"),
    (_K, _A): _within(_ASSIGNED),
    (_K, _N): _within(_ASSIGNED),
    (_K, _W): _within(_ASSIGNED),
    (_A, _N): _equal(_KEYED),
    (_A, _W): _equal("LoRA adapts imported models only, so the pair is LoRA itself"),
    (_N, _W): _equal(_KEYED),
}


def pairing(one: Feature, other: Feature) -> Pairing:
    """The verdict on ``one`` and ``other`` together. Raises ValueError if they are the same."""
    if one is other:
        raise ValueError(f"a pair is of two features, got {one.value} twice")
    found = _TABLE.get((one, other))
    return found if found is not None else _TABLE[other, one]


def features(config: TrainConfig, layout: Layout) -> dict[Feature, str]:
    """The features of a run of ``config`` on ``layout``, and the setting that requests each."""
    parallel = config.parallel
    found = {
        Feature.LAYER_MAJOR: ("data.micro_order = layer", config.data.layer_major),
        Feature.CHUNKS: ("parallel.pipeline_degree", parallel.pipeline_degree > 1),
        Feature.STAGES: ("parallel.stages", layout.stages > 1),
        Feature.TENSOR: ("parallel.tensor", layout.tensor > 1),
        Feature.HIERARCHICAL: (
            "parallel.exchange = hierarchical",
            parallel.exchange is ExchangeMode.HIERARCHICAL,
        ),
        Feature.EMBEDDING: (
            "parallel.embedding or parallel.head = partitioned",
            RowPlacement.PARTITIONED in (parallel.embedding, parallel.head) and layout.data > 1,
        ),
        Feature.TASKS: ("tasks", bool(config.tasks)),
        Feature.LORA: ("lora.rank", config.lora.enabled),
        Feature.NARROW: ("adamw.moments", config.adamw.moments is not MomentFormat.FP32),
        Feature.WRAPPED: ("an imported model", not isinstance(config.model, ModelConfig)),
    }
    return {feature: setting for feature, (setting, taken) in found.items() if taken}


def refusal(taken: Mapping[Feature, str], wanted: Feature) -> str | None:
    """Why ``wanted`` cannot be combined with the features ``taken``; None if it can. For settings that are ``auto``."""
    for feature, setting in taken.items():
        if feature is not wanted and pairing(feature, wanted).verdict is Compatibility.REFUSED:
            return f"not with {setting} ({feature.value}): {pairing(feature, wanted).why}"
    return None


def check_combination(config: TrainConfig, layout: Layout) -> None:
    """Raises ConfigError naming two settings that cannot be combined."""
    taken = features(config, layout)
    for feature, setting in taken.items():
        why = refusal(taken, feature)
        if why is not None:
            raise ConfigError(f"{setting}: {feature.value} {why}")
