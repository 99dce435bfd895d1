"""What follows from the shapes of a model's dense parameters: attention's widths, its cache, its low-rank pairs.

Imports neither torch nor transformers. Parameters are known by their names in memory, which transformers' decoders share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.hf.manifest import Manifest, UnitEntry
from tierstore.hf.spec import HfSpec

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
