"""How much memory a training pass of a model of transformers takes. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.model.config import CheckpointActivations
from tierstore.moe.config import SaveActivations

if TYPE_CHECKING:
    from tierstore.hf.spec import HfSpec


def activation_bytes(spec: HfSpec, tokens: int) -> int:
    """An upper estimate of what one training pass of ``tokens`` keeps and needs at its peak, in bytes."""
    width, d = spec.compute_dtype.itemsize, spec.d_model
    shape, rows = spec.expert_shape, tokens * spec.top_k
    mixture = rows * shape.inner_rows * width if spec.expert_activations is SaveActivations.SAVE else 0
    blocks = []
    for layer, unit in enumerate(spec.manifest.units[1:-1]):
        linear = sum(sum(p.shape) for p in unit.parameters if len(p.shape) == 2)
        blocks.append(tokens * (linear * width + 12 * d * 4) + (mixture if layer in spec.moe_layers else 0))
    kept = sum(blocks)
    if spec.checkpoint_activations is CheckpointActivations.BLOCK:
        kept = len(blocks) * tokens * d * width + max(blocks)
    scratch = rows * 4 * d * width + tokens * (shape.inner_rows + 2 * shape.d_ff) * width
    return kept + scratch + 3 * tokens * spec.vocab_size * 4


def forward_bytes(spec: HfSpec, tokens: int) -> int:
    """The same of a forward pass that keeps nothing for a backward pass."""
    width = spec.compute_dtype.itemsize
    widest = max(
        (
            sum(max(p.shape) for p in unit.parameters if len(p.shape) == 2)
            for unit in spec.manifest.units[1:-1]
        ),
        default=0,
    )
    shape = spec.expert_shape
    rows = tokens * spec.top_k * (spec.d_model + shape.inner_rows) + tokens * (
        shape.inner_rows + 2 * shape.d_ff
    )
    return tokens * (widest * width + 12 * spec.d_model * 4) + rows * width + 2 * tokens * spec.vocab_size * 4
