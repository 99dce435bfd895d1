"""The specification of a transformers model, made from its manifest; the memory that it takes, estimated from its dense
parameters' shapes; and the model of a store or a directory.

Parameters are recognised by their names in memory, which transformers' decoders share. Imports neither torch nor
transformers; only ``build`` and the description of a bare configuration do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.capabilities import require_package
from tierstore.config import as_dict
from tierstore.dense.layout import Narrow
from tierstore.errors import ConfigError, StoreError, StoreFormatError
from tierstore.hf.describing import (
    CONFIG_NAME,
    describe_config,
    model_class,
    parse_config,
    quiet_transformers,
    read_config,
    text_positions,
)
from tierstore.hf.families import ACTIVATIONS
from tierstore.hf.manifest import MANIFEST_NAME, ExpertEntry, ExpertLayout, Manifest, UnitEntry, Weights
from tierstore.model.architecture import Architecture, DenseUnit
from tierstore.model.config import CheckpointActivations
from tierstore.model.spec import ModelSpec, spec_of
from tierstore.model.store_schema import TrainState, from_conditions, recorded_model
from tierstore.model.vocabulary import VocabularyPartition
from tierstore.moe.config import Activation, ExpertShape, SaveActivations
from tierstore.moe.lora import LoraConfig
from tierstore.store.disk.home import MODEL_DIRECTORY
from tierstore.train.config import FinetuneConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tierstore.model.interface import Model
    from tierstore.moe.source import ExpertSource
    from tierstore.parallel import Mesh
    from tierstore.stats import StallLedger


#: Modules of a decoder layer that mix tokens, by transformers' names: their linear layers get pairs.
MIXERS = ("self_attn", "linear_attn")


@dataclass(frozen=True)
class AttentionPair:
    """The pair of linear layer ``name``: its A and B are parameters ``index`` and ``index + 1`` of dense unit ``unit``."""

    name: str
    outputs: int
    inputs: int
    unit: int
    index: int

    def sizes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A and B."""
        return (rank, self.inputs), (self.outputs, rank)


def attention_pairs(manifest: Manifest, lora: LoraConfig) -> list[AttentionPair]:
    """Attention's pairs, in the order of the model's parameters."""
    found = []
    for number, unit in enumerate(manifest.units):
        index = 0
        for parameter in unit.parameters if lora.attention else ():
            name = parameter.name.removesuffix(".weight")
            mixes = any(f".{mixer}." in name for mixer in MIXERS) and len(parameter.shape) == 2
            if mixes and (not lora.modules or name.rpartition(".")[2] in lora.modules):
                outputs, inputs = parameter.shape
                found.append(AttentionPair(name, outputs, inputs, number, index))
                index += 2
    return found


#: Families with linear attention layers, whose state does not restart at a new document.
_LINEAR = ("qwen3_next",)
_TOKENIZER_FILES = ("tokenizer", "vocab.", "merges.", "spiece.")


@dataclass(frozen=True, kw_only=True)
class HfSpec(ModelSpec):
    """A transformers model as a run configures it; ``hf_spec`` makes it of the model's ``manifest``.

    ``config``: the values of its config.json. ``directory``: where config.json and the tokenizer's files are; None if only
    the configuration is known, which is enough for a plan.
    """

    manifest: Manifest
    finetune: FinetuneConfig
    lora: LoraConfig
    config: Mapping[str, Any] = field(hash=False)
    directory: Path | None

    @property
    def top_k(self) -> int:
        return self.manifest.experts.top_k

    def pass_bytes(self, tokens: int, blocks: range | None) -> int:
        """An upper estimate of the peak memory of one training pass of ``tokens``, in bytes: of all decoder layers, or of
        ``blocks``, and of the head if they end with the last layer.
        """
        units = self.manifest.units[1:-1]
        numbers = range(len(units)) if blocks is None else blocks
        layers = [_layer(self, index, units[index], tokens) for index in numbers]
        head = _head(self, tokens) if numbers.stop == len(units) else 0
        if self.checkpoint_activations is CheckpointActivations.BLOCK:
            inputs = len(layers) * tokens * self.d_model * self.compute_dtype.itemsize
            return inputs + max(head, max(map(sum, layers)))
        return sum(kept for kept, _ in layers) + max(head, max(scratch for _, scratch in layers))

    def layer_order_bytes(self, tokens: int, micro_batches: int) -> int:
        """The graphs of one layer for all micro-batches at once, with the stream before and after it."""
        self._refuse_stage()
        stream = 2 * tokens * self.d_model * self.compute_dtype.itemsize
        head = _head(self, tokens)
        return micro_batches * stream + max(head, micro_batches * _widest(self, tokens))

    def forward_bytes(self, tokens: int, *, logits: int | None = None) -> int:
        rows = tokens if logits is None else logits
        return max(rows * self.vocab_size * (self.compute_dtype.itemsize + 4), _widest(self, tokens))

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of keys and values of ``tokens`` tokens in the compute type, as transformers caches them."""
        cached = sum(attention_sizes(self, unit).cached for unit in self.manifest.units[1:-1])
        return tokens * cached * self.compute_dtype.itemsize

    def vary(self, name: str, value: object) -> HfSpec | None:
        """The same model with ``value`` for the fine-tuning option ``name``; None if ``name`` is no such option."""
        if name not in FinetuneConfig.__dataclass_fields__:
            return None
        finetune = replace(self.finetune, **{name: value})  # type: ignore[arg-type]
        varied = hf_spec(self.manifest, self.config, finetune, self.lora, self.directory)
        return varied if self.whole is None else varied.stage(self.layers, held=self.held)

    def settings(self) -> dict[str, object]:
        """The model's identity and, under ``tuning``, the choices of a run."""
        manifest, experts = self.manifest, self.manifest.experts
        return {
            "model_type": manifest.model_type,
            "architecture": manifest.architecture,
            "fingerprint": manifest.fingerprint,
            "compute_dtype": self.compute_dtype.value,
            "weights": manifest.weights.value,
            **({} if self.expert_codes is None else {"codes": self.expert_codes.value}),
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "layers": manifest.layers,
            "moe_layers": list(experts.layers),
            "experts": experts.count,
            "top_k": experts.top_k,
            "d_ff": experts.d_ff,
            "activation": self.expert_shape.activation.value,
            "tuning": {
                "seq_len": self.seq_len,
                "checkpoint_activations": self.checkpoint_activations.value,
                "expert_activations": self.expert_activations.value,
                "aux_loss_weight": self.finetune.aux_loss_weight,
                "bias_update_speed": self.finetune.bias_update_speed,
            },
            **({"lora": as_dict(self.lora)} if self.lora.enabled else {}),
        }

    def import_code(self) -> None:
        """Imports transformers, its module of the family, and peft for LoRA. Raises ConfigError, CapabilityError."""
        with quiet_transformers():
            model_class(parse_config(self.config))
            if self.lora.enabled:
                require_package("peft", "LoRA of attention")

    def build(
        self,
        source: ExpertSource,
        *,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        vocabulary: VocabularyPartition | None = None,
    ) -> Model:
        if vocabulary not in (None, VocabularyPartition()):
            raise ConfigError(
                "parallel.embedding, parallel.head: expected gathered: an imported model cannot divide them"
            )
        model: Model = import_module("tierstore.hf.model").build_model(self, source, mesh=mesh, ledger=ledger)
        return model

    def first_weights(self, layer: int, expert: int) -> npt.NDArray[np.float32]:
        raise StoreError(
            f"{self.directory or self.manifest.source}: expert {expert} of layer {layer} is missing: the weights of an "
            "imported model are in its store"
        )


def hf_spec(
    manifest: Manifest,
    config: Mapping[str, Any],
    finetune: FinetuneConfig | None = None,
    lora: LoraConfig | None = None,
    directory: Path | None = None,
) -> HfSpec:
    """The specification of the model of ``manifest`` and of ``config``, the values of its config.json. ``directory``: see
    ``HfSpec``. Raises ConfigError for experts with an unknown activation.
    """
    finetune, lora, experts = finetune or FinetuneConfig(), lora or LoraConfig(), manifest.experts
    positions = text_positions(config)
    has_tokenizer = any(name.startswith(_TOKENIZER_FILES) for name in manifest.files)
    return HfSpec(
        manifest=manifest,
        finetune=finetune,
        lora=lora,
        config=config,
        directory=directory,
        seq_len=finetune.length(positions),
        positions=positions,
        vocab_size=manifest.vocab_size,
        d_model=manifest.d_model,
        compute_dtype=manifest.compute,
        expert_codes=manifest.codes,
        checkpoint_activations=finetune.checkpoint_activations,
        expert_activations=finetune.expert_activations,
        moe_layers=experts.layers,
        experts=experts.count,
        expert_shape=_expert_shape(experts, config),
        architecture=Architecture(
            units=tuple(_dense_unit(manifest, unit) for unit in manifest.units),
            moe_layers=experts.layers,
            experts=experts.count,
            expert_numel=experts.numel,
            top_k=experts.top_k,
        ),
        adapter_units=pair_parameters(manifest, lora) if lora.enabled else (),
        tokenizer=directory if has_tokenizer else None,
        mixes_documents=f"the state of linear attention ({manifest.model_type}) would carry over from document to document"
        if manifest.model_type in _LINEAR
        else "",
        no_stages="expected 1: the head of this model is its embedding; the first and the last stage would both have the "
        "table, and its gradient would be summed in another order than one process does"
        if manifest.tied
        else "",
        layers=range(manifest.layers),
    )


def _expert_shape(experts: ExpertEntry, config: Mapping[str, Any]) -> ExpertShape:
    if experts.layout is ExpertLayout.INTERLEAVED_BIASED:
        given = {
            name: float(config[key])
            for name, key in (("alpha", "swiglu_alpha"), ("limit", "swiglu_limit"))
            if config.get(key) is not None
        }
        return ExpertShape(experts.d_model, experts.d_ff, Activation.CLAMPED_SWIGLU, **given)
    if experts.activation not in ACTIVATIONS:
        raise ConfigError(f"hidden_act: expected one of {', '.join(ACTIVATIONS)}, got {experts.activation!r}")
    return ExpertShape(experts.d_model, experts.d_ff, ACTIVATIONS[experts.activation])


def _dense_unit(manifest: Manifest, unit: UnitEntry) -> DenseUnit:
    narrow = sum(p.numel for p in unit.parameters if manifest.narrow(p) is Narrow.YES)
    return DenseUnit(matrices=narrow, others=unit.numel - narrow)


def pair_parameters(manifest: Manifest, lora: LoraConfig) -> tuple[int, ...]:
    """Parameters of attention's low-rank pairs, by dense unit."""
    counts = [0 for _ in manifest.units]
    for pair in attention_pairs(manifest, lora):
        counts[pair.unit] += lora.rank * (pair.outputs + pair.inputs)
    return tuple(counts)


# Memory -----------------------------------------------------------------------------------------------------
#
# Memory that autograd keeps per token of a decoder layer, with D the model's width, F an expert's, P its activation's input,
# and w the bytes of the compute type: norms in fp32 and their results; queries, keys and values of all heads,
# attention's result twice; the inputs of the experts' activations and their results, of each of K experts; four values
# for each of a dense network's. Attention without a fused kernel (attention sinks; latent attention, whose values are
# narrower than its keys) keeps its probabilities too. tests/hf compares the estimate with torch's allocations.

_QUERY = ("q_proj", "q_b_proj")


#: Linear attention without its kernel (Qwen3-Next): fp32 values for each value of its input projections, and for each
#: head and each of a chunk's 64 tokens; both were measured.
_LINEAR_COPIES, _CHUNK_COPIES, _CHUNK = 7, 4, 64


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """One layer's attention. ``queries``: width of all heads' queries, ``values``: of what goes to the output projection;
    ``cached``: values that a token leaves in the cache of keys and values.
    """

    queries: int = 0
    values: int = 0
    cached: int = 0

    @property
    def products(self) -> int:
        """The mean width of attention's two products; the built-in model's is its own width."""
        return (self.queries + self.values) // 2


def attention_sizes(spec: HfSpec, unit: UnitEntry) -> AttentionSizes:
    """Widths of the softmax attention in ``unit``; zeros if it has only linear attention."""
    found = {
        parameter.name.removesuffix(".weight").rpartition(".")[2]: parameter.shape
        for parameter in unit.parameters
        if ".self_attn." in parameter.name and len(parameter.shape) == 2
    }
    if "o_proj" not in found:
        return AttentionSizes()
    values = found["o_proj"][1]
    queries = next((found[name][0] for name in _QUERY if name in found), values)
    if "k_proj" in found:
        # A gate on the output (Qwen3-Next) makes the query projection twice as wide as its heads.
        return AttentionSizes(min(queries, values), values, found["k_proj"][0] + found["v_proj"][0])
    # Latent attention: transformers caches the heads' common latent vector, and the part of keys that has positions.
    return AttentionSizes(queries, values, found["kv_a_proj_with_mqa"][0])


def _widest(spec: HfSpec, tokens: int) -> int:
    """The most bytes of one decoder layer."""
    return max(sum(_layer(spec, index, unit, tokens)) for index, unit in enumerate(spec.manifest.units[1:-1]))


def _head(spec: HfSpec, tokens: int) -> int:
    """Bytes of the last norm, the logits and their loss."""
    width = spec.compute_dtype.itemsize
    return _norm(width, spec.d_model, tokens) + tokens * spec.vocab_size * (12 if width == 4 else 14)


def _norm(width: int, size: int, tokens: int) -> int:
    """A norm of ``size`` values: its input in fp32, the normalised values and the result in the compute type."""
    return tokens * size * (4 + 2 * width)


def _layer(spec: HfSpec, index: int, unit: UnitEntry, tokens: int) -> tuple[int, int]:
    """Bytes of one decoder layer: kept for the backward pass, and scratch beside that while it runs."""
    width, d, seq = spec.compute_dtype.itemsize, spec.d_model, min(spec.seq_len, tokens)
    names = {parameter.name.split(".", 3)[-1]: parameter.shape for parameter in unit.parameters}
    attention = attention_sizes(spec, unit)
    plain = "input_layernorm.bias" in names  # torch's own layer norm keeps no normalised values
    kept = 4 * tokens * d * width if plain else 2 * _norm(width, d, tokens)
    kept += tokens * width * (2 * attention.queries + 3 * attention.values)
    scratch = tokens * 4 * d * 4
    for name, shape in names.items():
        part = name.split(".")
        if "q_norm" in part:  # the norm of one head or of all heads
            kept += _norm(width, attention.queries, tokens)
        elif "k_norm" in part:
            kept += _norm(width, attention.cached // 2, tokens)
        elif "q_a_layernorm" in part or "kv_a_layernorm" in part:
            kept += _norm(width, shape[0], tokens)
        elif "kv_b_proj" in part:
            scores = tokens * seq * int(spec.config.get("num_attention_heads", 0))
            kept += 4 * scores + tokens * 8 * attention.queries
            scratch += 0 if width == 4 else 3 * scores
        elif "gate_proj" in part or "up_proj" in part:
            kept += tokens * width * 2 * shape[0]
        elif "linear_attn" in part and len(shape) == 2:
            kept += tokens * 4 * _LINEAR_COPIES * shape[0]
        elif "A_log" in part:
            kept += tokens * 4 * _CHUNK_COPIES * _CHUNK * shape[0]
        elif "sinks" in part:
            kept += tokens * seq * shape[0] * width
            scratch += tokens * seq * shape[0] * 5
    if index not in spec.moe_layers:
        return kept, scratch
    expert, rows = spec.expert_shape, tokens * spec.top_k
    results = rows * d * width
    kept += tokens * spec.experts * 24
    if spec.expert_activations is SaveActivations.SAVE:
        kept += rows * expert.inner_rows * width + results
        again = 0
    else:
        again = results
    # Gradients of results, inputs, gradients of inputs; and one expert's with every token at it.
    return kept, scratch + 3 * results + again + tokens * (expert.inner_rows + 2 * expert.d_ff) * width


# Of a store -------------------------------------------------------------------------------------------------


def stored_spec(
    store: Path, finetune: FinetuneConfig | None = None, lora: LoraConfig | None = None
) -> HfSpec | None:
    """The model that was imported into ``store``, trained as ``finetune`` and ``lora`` say; None if it holds no import.

    Raises StoreFormatError for a damaged manifest, and ConfigError for a damaged config.json, or for LoRA on a store whose
    own weights are trained.
    """
    directory = store / MODEL_DIRECTORY
    if not (directory / MANIFEST_NAME).exists():
        return None
    manifest = Manifest.read(store)
    if lora is not None and lora.enabled and manifest.weights is not Weights.FROZEN:
        raise ConfigError(
            f"lora.rank: {store} was imported to train the whole model; tierstore import --frozen makes a store for LoRA"
        )
    return hf_spec(manifest, read_config(directory / CONFIG_NAME), finetune, lora, directory)


def imported_spec(store: Path) -> HfSpec:
    """As ``stored_spec``. Raises StoreFormatError if ``store`` holds no import."""
    spec = stored_spec(store)
    if spec is None:
        raise StoreFormatError(f"{store}: no imported model")
    return spec


def recorded_spec(store: Path, state: TrainState) -> ModelSpec:
    """The model in ``store`` at training state ``state``: the imported model, with its LoRA pairs, or the built-in one.
    Raises StoreFormatError if the recorded conditions of the run are damaged.
    """
    return stored_spec(store, lora=recorded_lora(store, state)) or spec_of(
        recorded_model(state, where=str(store))
    )


def recorded_lora(store: Path, state: TrainState) -> LoraConfig:
    """The configuration of the pairs in ``store``; its rank is 0 if there are none. Raises StoreFormatError."""
    model = state.conditions.get("model")
    given = model.get("lora") if isinstance(model, Mapping) else None
    return LoraConfig() if given is None else from_conditions(LoraConfig, given, where=str(store))


def model_of(path: Path, finetune: FinetuneConfig | None = None) -> HfSpec:
    """The model of a transformers model directory, of a config.json, or of a store with an imported model.

    Its weights are not looked at. A directory or file needs transformers, a store does not. Raises ConfigError,
    CapabilityError, StoreFormatError, OSError.
    """
    for directory in (path, path.parent):
        # The model directory of an imported store; elsewhere a file of that name is not tierstore's.
        if directory.absolute().name == MODEL_DIRECTORY and (directory / MANIFEST_NAME).exists():
            path = directory.parent
    spec = stored_spec(path, finetune)
    if spec is not None:
        return spec
    config = read_config(path)
    where = str(path / CONFIG_NAME if path.is_dir() else path)
    return hf_spec(describe_config(config, where=where), config, finetune)
