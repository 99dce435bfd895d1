"""What the tokens of served sequences take of memory: keys and values, and the states of linear attention. Imports no torch.

A sequence takes memory as it grows, and at most what its context needs: so ``batch.sequences`` sequences of
``batch.context`` tokens are the bound, which is held against the machine before anything is served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tierstore.errors import BudgetError
from tierstore.hf.sizes import cache_bytes
from tierstore.hf.spec import HfSpec
from tierstore.serve.config import BatchConfig
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.model.spec import ModelSpec

#: A sequence shorter than this serves nobody.
_LEAST_CONTEXT = 128
#: Columns by which a context is made shorter.
_ROUND = 64


def sequence_bytes(spec: ModelSpec, tokens: int) -> int:
    """The most that a sequence of ``tokens`` tokens takes."""
    if not isinstance(spec, HfSpec):
        return tokens * 2 * spec.d_model * (len(spec.architecture.units) - 2) * spec.compute_dtype.itemsize
    return cache_bytes(spec, tokens) + _state_bytes(spec)


def batch_bytes(spec: ModelSpec, *, sequences: int, context: int) -> int:
    """The most that a batch takes: while a pass appends to a layer, that layer is there twice."""
    layers = len(spec.architecture.units) - 2
    whole = sequences * sequence_bytes(spec, context)
    return whole + -(-whole // layers)


def fitted_batch(spec: ModelSpec, batch: BatchConfig, *, longest: int, room: int) -> BatchConfig:
    """``batch`` with its context, of at most ``longest`` tokens, so that it fits in ``room`` bytes.

    Without a context (0) it is as long as fits. Raises BudgetError where the one that is given, or a short one, does not.
    """
    asked = batch.context or longest
    needed = batch_bytes(spec, sequences=batch.sequences, context=asked)
    if needed <= room:
        return replace(batch, context=asked)
    constant = batch_bytes(spec, sequences=batch.sequences, context=0)
    most = (room - constant) * asked // max(needed - constant, 1) // _ROUND * _ROUND
    if batch.context or most < _LEAST_CONTEXT:
        raise BudgetError(
            f"batch.context: {batch.sequences} sequences of {asked} tokens take {format_bytes(needed)} for keys and "
            f"values, and {format_bytes(max(room, 0))} are left; {max(most, 0)} tokens would fit, or fewer sequences "
            "(batch.sequences)"
        )
    return replace(batch, context=most)


def _state_bytes(spec: HfSpec) -> int:
    """States of linear attention (gated delta rule): what the convolution looks back to, and a matrix for each head."""
    config, total = spec.config, 0
    heads = int(config.get("linear_num_value_heads", 0))
    matrix = int(config.get("linear_key_head_dim", 0)) * int(config.get("linear_value_head_dim", 0))
    for unit in spec.manifest.units:
        for parameter in unit.parameters:
            if ".linear_attn.conv1d." in parameter.name:
                total += parameter.numel * spec.compute_dtype.itemsize + heads * matrix * 4
    return total
