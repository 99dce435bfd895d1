"""The MoE model families that can be imported: the names of their tensors on disk and in memory.

transformers keeps the experts of a layer in fused parameters (``ExpertLayout`` of the manifest) and renames some dense
parameters when it loads a checkpoint; on disk, most families have three matrices an expert. This module maps the names
in both directions, one expert at a time. Imports neither torch nor transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from tierstore.errors import ConfigError
from tierstore.hf.manifest import ExpertEntry, ExpertLayout, ParameterEntry
from tierstore.moe.config import Activation

#: transformers' names of the functions behind a gate.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": Activation.SWIGLU,
        "swish": Activation.SWIGLU,
        "gelu": Activation.GEGLU,
        "gelu_pytorch_tanh": Activation.GEGLU_TANH,
        "relu": Activation.REGLU,
    }
)


class OnDisk(Enum):
    """How a checkpoint keeps experts."""

    #: Three matrices for each expert.
    SEPARATE = "separate"
    #: Two for all experts of a layer, (E, 2F, D) and (E, D, F).
    FUSED = "fused"
    #: The same two with their biases, transposed: (E, D, 2F), (E, 2F), (E, F, D), (E, D).
    FUSED_BIASED = "fused-biased"


@dataclass(frozen=True)
class Part:
    """A tensor that is a part of one expert's record, or row ``index`` of one that holds all experts of a layer.

    ``shape``: of the expert's part, without the row; ``offset``: its first value in the record.
    """

    source: str
    index: int | None
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def whole(cls, entry: ParameterEntry) -> Part:
        """All of a dense parameter or buffer."""
        return cls(entry.source, None, entry.shape, 0)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Family:
    """One family. ``experts``: the paths of an expert's tensors on disk below its layer, with ``{expert}``, in the
    record's order. ``renamed``: endings of dense names in memory, and what they are on disk. ``carried``: patterns of
    tensors that the family ignores; ``extra_layers``: so are decoder layers beyond the last (next-token prediction).
    """

    model_type: str
    #: The module of a layer that has the experts, in memory.
    module: str
    on_disk: OnDisk
    experts: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...] = ()
    carried: tuple[str, ...] = ()
    extra_layers: bool = False

    @property
    def layout(self) -> ExpertLayout:
        biased = self.on_disk is OnDisk.FUSED_BIASED
        return ExpertLayout.INTERLEAVED_BIASED if biased else ExpertLayout.CONCATENATED

    def expert_parts(self, layer: int, expert: int, experts: ExpertEntry) -> list[Part]:
        """The tensors of one expert, in the order of its record."""
        d_model, d_ff = experts.d_model, experts.d_ff
        shapes: tuple[tuple[int, ...], ...]
        if self.on_disk is OnDisk.SEPARATE:
            shapes = ((d_ff, d_model), (d_ff, d_model), (d_model, d_ff))
        elif self.on_disk is OnDisk.FUSED:
            shapes = ((2 * d_ff, d_model), (d_model, d_ff))
        else:
            shapes = ((d_model, 2 * d_ff), (2 * d_ff,), (d_ff, d_model), (d_model,))
        index = None if self.on_disk is OnDisk.SEPARATE else expert
        parts, offset = [], 0
        for path, shape in zip(self.experts, shapes, strict=True):
            parts.append(Part(f"model.layers.{layer}.{path.format(expert=expert)}", index, shape, offset))
            offset += parts[-1].numel
        return parts

    @property
    def fused_names(self) -> tuple[str, ...]:
        """The parameters of all experts of a layer in memory, below the layer, in the order of an expert's record."""
        names = _BIASED if self.layout is ExpertLayout.INTERLEAVED_BIASED else ("gate_up_proj", "down_proj")
        return tuple(f"{self.module}.experts.{name}" for name in names)

    def source_of(self, name: str) -> str:
        """The name on disk of the dense parameter or buffer ``name``."""
        for memory, disk in self.renamed:
            if name.endswith(memory):
                return name.removesuffix(memory) + disk
        return name

    def is_carried(self, source: str, layers: int) -> bool:
        """Whether the tensor ``source`` on disk is one that the family ignores, in a model of ``layers`` layers."""
        if any(re.search(pattern, source) for pattern in (*_CARRIED_BY_ALL, *self.carried)):
            return True
        number = re.match(r"model\.layers\.(\d+)\.", source)
        return self.extra_layers and number is not None and int(number[1]) >= layers


#: Buffers of old checkpoints, which transformers ignores everywhere.
_CARRIED_BY_ALL = (r"rotary_emb\.inv_freq$",)

_W123 = tuple(f"block_sparse_moe.experts.{{expert}}.{name}.weight" for name in ("w1", "w3", "w2"))
_BIASED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
_PROJ = tuple(f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down"))


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "mixtral",
            "mlp",
            OnDisk.SEPARATE,
            _W123,
            renamed=((".mlp.gate.weight", ".block_sparse_moe.gate.weight"),),
        ),
        Family("qwen2_moe", "mlp", OnDisk.SEPARATE, _PROJ),
        Family("qwen3_moe", "mlp", OnDisk.SEPARATE, _PROJ),
        Family("olmoe", "mlp", OnDisk.SEPARATE, _PROJ),
        Family("deepseek_v2", "mlp", OnDisk.SEPARATE, _PROJ),
        Family("deepseek_v3", "mlp", OnDisk.SEPARATE, _PROJ, extra_layers=True),
        Family("glm4_moe", "mlp", OnDisk.SEPARATE, _PROJ, extra_layers=True),
        Family("qwen3_next", "mlp", OnDisk.SEPARATE, _PROJ, carried=(r"^mtp\.",)),
        Family(
            "granitemoe",
            "block_sparse_moe",
            OnDisk.FUSED,
            ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
            renamed=((".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),),
        ),
        Family(
            "phimoe",
            "mlp",
            OnDisk.SEPARATE,
            _W123,
            renamed=((".mlp.router.weight", ".block_sparse_moe.gate.weight"),),
        ),
        Family(
            "gpt_oss",
            "mlp",
            OnDisk.FUSED_BIASED,
            tuple(f"mlp.experts.{name}" for name in _BIASED),
        ),
    )
}


def family_of(model_type: object, *, where: str) -> Family:
    """The family of ``model_type``. Raises ConfigError listing the known families and what a new one would need."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not supported; expected one of the known families "
            f"({', '.join(FAMILIES)}); a new family needs a description of how its experts are stored and computed"
        )
    return family
