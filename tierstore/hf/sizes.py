"""How much memory a model of transformers takes, by the shapes of its dense parameters: attention's widths, its cache, its
low-rank pairs, and what a pass keeps. Imports neither torch nor transformers. Parameters are known by their names in
memory, which transformers' decoders share.

What autograd keeps of a decoder layer, a token, with D the model's width, F an expert's, P what feeds its activation, and w
the bytes of the compute type: norms in fp32 and their results; queries, keys and values of all heads, attention's result
twice; the inputs of the experts' activations and their results, of each of K experts; four values for each of a dense
network's. Attention without a fused kernel (attention sinks; latent attention, whose values are narrower than its keys)
keeps its probabilities too. tests/hf holds the estimate against what torch allocates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.hf.manifest import Manifest, UnitEntry
from tierstore.hf.spec import HfSpec
from tierstore.model.config import CheckpointActivations
from tierstore.moe.config import SaveActivations

_ATTENTION = (".self_attn.", ".linear_attn.")
_QUERY = ("q_proj", "q_b_proj")


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


def attention_linears(manifest: Manifest, unit: UnitEntry) -> Iterator[tuple[str, int, int]]:
    """Name, outputs and inputs of each linear layer in a unit's attention."""
    for parameter in unit.parameters:
        if len(parameter.shape) == 2 and any(part in parameter.name for part in _ATTENTION):
            outputs, inputs = parameter.shape
            yield parameter.name.removesuffix(".weight"), outputs, inputs


def pair_parameters(manifest: Manifest, rank: int) -> list[int]:
    """Parameters of the low-rank pairs of attention, by unit: ``rank`` x (inputs + outputs) of each linear layer."""
    return [
        sum(rank * (outputs + inputs) for _, outputs, inputs in attention_linears(manifest, unit))
        for unit in manifest.units
    ]


def attention_sizes(spec: HfSpec, unit: UnitEntry) -> AttentionSizes:
    """Of the softmax attention in ``unit``; zeros where it has none, but linear attention."""
    found = {
        name.rpartition(".")[2]: (outputs, inputs)
        for name, outputs, inputs in attention_linears(spec.manifest, unit)
        if ".self_attn." in name
    }
    if "o_proj" not in found:
        return AttentionSizes()
    values = found["o_proj"][1]
    queries = next((found[name][0] for name in _QUERY if name in found), values)
    if "k_proj" in found:
        # A gate on the output (Qwen3-Next) makes the query projection twice as wide as its heads.
        return AttentionSizes(min(queries, values), values, found["k_proj"][0] + found["v_proj"][0])
    # Latent attention: transformers caches what heads are made of, and the part of keys that has positions.
    return AttentionSizes(queries, values, found["kv_a_proj_with_mqa"][0])


def cache_bytes(spec: HfSpec, tokens: int) -> int:
    """Bytes of keys and values of ``tokens`` tokens in the compute type, as transformers caches them."""
    cached = sum(attention_sizes(spec, unit).cached for unit in spec.manifest.units[1:-1])
    return tokens * cached * spec.compute_dtype.itemsize


# Activations ------------------------------------------------------------------------------------------------


#: Linear attention without its kernel (Qwen3-Next): fp32 values for each value of its input projections, and for each
#: head and each of 64 tokens of a chunk; both as measured.
_LINEAR_COPIES, _CHUNK_COPIES, _CHUNK = 7, 4, 64


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes of one decoder layer: ``kept`` for the backward pass, ``scratch`` beside that while it runs."""

    kept: int
    scratch: int


def activation_bytes(spec: HfSpec, tokens: int, blocks: range | None = None) -> int:
    """An upper estimate of what one training pass of ``tokens`` keeps and needs at its peak, in bytes, through all decoder
    layers, or through ``blocks`` with what comes behind them.
    """
    width, d, units = spec.compute_dtype.itemsize, spec.d_model, spec.manifest.units[1:-1]
    numbers = range(len(units)) if blocks is None else blocks
    layers = [_layer(spec, index, units[index], tokens) for index in numbers]
    ends = numbers.stop == len(units)
    head = _head(spec, tokens) if ends else 0
    widest = max(layer.scratch for layer in layers)
    if spec.checkpoint_activations is CheckpointActivations.BLOCK:
        inputs = len(layers) * tokens * d * width
        return inputs + max(head, max(layer.kept + layer.scratch for layer in layers))
    return sum(layer.kept for layer in layers) + max(head, widest)


def layer_order_bytes(spec: HfSpec, tokens: int, micro_batches: int) -> int:
    """The same of a step in layer order, of ``micro_batches`` of ``tokens`` each, beside the block inputs that it keeps:
    the graphs of one layer for all of them at once, with the stream before and behind it.
    """
    width, d = spec.compute_dtype.itemsize, spec.d_model
    layers = [_layer(spec, index, unit, tokens) for index, unit in enumerate(spec.manifest.units[1:-1])]
    head = _head(spec, tokens)
    stream = 2 * tokens * d * width
    return micro_batches * stream + max(
        head, micro_batches * max(layer.kept + layer.scratch for layer in layers)
    )


def forward_bytes(spec: HfSpec, tokens: int) -> int:
    """The same of a forward pass that keeps nothing for a backward pass."""
    layers = [_layer(spec, index, unit, tokens) for index, unit in enumerate(spec.manifest.units[1:-1])]
    logits = tokens * spec.vocab_size * (spec.compute_dtype.itemsize + 4)
    return max(logits, max(layer.kept + layer.scratch for layer in layers))


def _head(spec: HfSpec, tokens: int) -> int:
    """The last norm, logits and their loss."""
    width = spec.compute_dtype.itemsize
    return _norm(width, spec.d_model, tokens) + tokens * spec.vocab_size * (12 if width == 4 else 14)


def _norm(width: int, size: int, tokens: int) -> int:
    """A norm of ``size`` values: its input in fp32, the normalised values and the result in the compute type."""
    return tokens * size * (4 + 2 * width)


def _layer(spec: HfSpec, index: int, unit: UnitEntry, tokens: int) -> _Layer:
    width, d, seq = spec.compute_dtype.itemsize, spec.d_model, min(spec.seq_len, tokens)
    names = {parameter.name.split(".", 3)[-1]: parameter.shape for parameter in unit.parameters}
    attention = attention_sizes(spec, unit)
    plain = "input_layernorm.bias" in names  # torch's own layer norm keeps no normalised values
    kept = 4 * tokens * d * width if plain else 2 * _norm(width, d, tokens)
    kept += tokens * width * (2 * attention.queries + 3 * attention.values)
    scratch = tokens * 4 * d * 4
    for name, shape in names.items():
        part = name.split(".")
        if "q_norm" in part:  # of one head or of all
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
        return _Layer(kept, scratch)
    expert, rows = spec.expert_shape, tokens * spec.top_k
    results = rows * d * width
    kept += tokens * spec.experts * 24
    if spec.expert_activations is SaveActivations.SAVE:
        kept += rows * expert.inner_rows * width + results
        again = 0
    else:
        again = results
    # Gradients of results, inputs, gradients of inputs; and one expert's with every token at it.
    return _Layer(
        kept, scratch + 3 * results + again + tokens * (expert.inner_rows + 2 * expert.d_ff) * width
    )
