"""Where LoRA puts pairs on a model's attention, by its manifest alone. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.hf.manifest import Manifest
from tierstore.moe.lora import LoraConfig

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
