"""The specification of a model of transformers, made of its manifest: what a run is configured with before it is built.

Imports neither torch nor transformers; only ``build`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tierstore.config import as_dict
from tierstore.dense.layout import Narrow
from tierstore.errors import ConfigError, StoreError
from tierstore.hf.manifest import ExpertLayout, Manifest, UnitEntry
from tierstore.hf.pairs import attention_pairs
from tierstore.hf.sizes import text_positions
from tierstore.model.architecture import Architecture, DenseUnit
from tierstore.model.config import CheckpointActivations, ComputeDtype
from tierstore.model.vocabulary.partition import VocabularyPartition
from tierstore.moe.config import Activation, ExpertShape, SaveActivations
from tierstore.moe.lora import LoraConfig
from tierstore.quant.layout import CodeFormat
from tierstore.train.config import FinetuneConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tierstore.model.interface import Model
    from tierstore.moe.source import ExpertSource
    from tierstore.parallel import Mesh
    from tierstore.stats import StallLedger

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
#: Families with layers of linear attention, whose state knows no positions.
_LINEAR = ("qwen3_next",)
_TOKENIZER_FILES = ("tokenizer", "vocab.", "merges.", "spiece.")


@dataclass(frozen=True, kw_only=True)
class HfSpec:
    """A model of transformers as a run is configured with it (a ``ModelSpec``).

    ``config``: the values of its config.json. ``directory``: where config.json and the tokenizer's files are; None where
    nothing but the configuration is known, which is enough for a plan.
    """

    manifest: Manifest
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    directory: Path | None = None

    # What it is ---------------------------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        return self.finetune.length(self.positions)

    @cached_property
    def positions(self) -> int:
        return text_positions(self.config)

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def d_model(self) -> int:
        return self.manifest.d_model

    @property
    def compute_dtype(self) -> ComputeDtype:
        return self.manifest.compute

    @property
    def checkpoint_activations(self) -> CheckpointActivations:
        return self.finetune.checkpoint_activations

    @property
    def expert_activations(self) -> SaveActivations:
        return self.finetune.expert_activations

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self.manifest.experts.layers

    @property
    def experts(self) -> int:
        return self.manifest.experts.count

    @property
    def top_k(self) -> int:
        return self.manifest.experts.top_k

    @property
    def expert_codes(self) -> CodeFormat | None:
        return self.manifest.codes

    @property
    def expert_shape(self) -> ExpertShape:
        """Raises ConfigError for an activation that is not known."""
        experts = self.manifest.experts
        if experts.layout is ExpertLayout.INTERLEAVED_BIASED:
            given = {
                name: float(self.config[key])
                for name, key in (("alpha", "swiglu_alpha"), ("limit", "swiglu_limit"))
                if self.config.get(key) is not None
            }
            return ExpertShape(experts.d_model, experts.d_ff, Activation.CLAMPED_SWIGLU, **given)
        if experts.activation not in ACTIVATIONS:
            raise ConfigError(
                f"hidden_act: expected one of {', '.join(ACTIVATIONS)}, got {experts.activation!r}"
            )
        return ExpertShape(experts.d_model, experts.d_ff, ACTIVATIONS[experts.activation])

    @cached_property
    def architecture(self) -> Architecture:
        experts = self.manifest.experts
        return Architecture(
            units=tuple(self._dense_unit(unit) for unit in self.manifest.units),
            moe_layers=experts.layers,
            experts=experts.count,
            expert_numel=experts.numel,
            top_k=experts.top_k,
        )

    def _dense_unit(self, unit: UnitEntry) -> DenseUnit:
        narrow = sum(p.numel for p in unit.parameters if self.manifest.narrow(p) is Narrow.YES)
        return DenseUnit(matrices=narrow, others=unit.numel - narrow)

    @property
    def adapter_units(self) -> tuple[int, ...]:
        if not self.lora.enabled:
            return ()
        counts = [0 for _ in self.manifest.units]
        for pair in attention_pairs(self.manifest, self.lora):
            counts[pair.unit] += self.lora.rank * (pair.outputs + pair.inputs)
        return tuple(counts)

    @property
    def tokenizer(self) -> Path | None:
        """The directory of its tokenizer's files; None without any."""
        if any(name.startswith(_TOKENIZER_FILES) for name in self.manifest.files):
            return self.directory
        return None

    @property
    def mixes_documents(self) -> str:
        kind = self.manifest.model_type
        return f"linear attention ({kind}) takes its state over documents" if kind in _LINEAR else ""

    def check_stages(self) -> None:
        """Raises ConfigError for a tied embedding."""
        if self.manifest.tied:
            raise ConfigError(
                "parallel.stages: expected 1: the head of this model is its embedding; the first and the last stage would "
                "both have the table, and its gradient would be summed in another order than one process does"
            )

    def activation_bytes(self, tokens: int, blocks: range | None = None) -> int:
        """An upper estimate of what one training pass of ``tokens`` keeps and needs at its peak, in bytes, through all
        decoder layers or through ``blocks``.
        """
        from tierstore.hf.activations import activation_bytes

        return activation_bytes(self, tokens, blocks)

    def layer_order_bytes(self, tokens: int, micro_batches: int) -> int:
        """The same of a step in layer order, of ``micro_batches`` of ``tokens`` each, beside the block inputs."""
        from tierstore.hf.activations import layer_order_bytes

        return layer_order_bytes(self, tokens, micro_batches)

    def settings(self) -> dict[str, object]:
        """The model's identity, and under ``tuning`` what a run chooses of it."""
        experts = self.manifest.experts
        return {
            "model_type": self.manifest.model_type,
            "architecture": self.manifest.architecture,
            "fingerprint": self.manifest.fingerprint,
            "compute_dtype": self.compute_dtype.value,
            "weights": self.manifest.weights.value,
            **({} if self.expert_codes is None else {"codes": self.expert_codes.value}),
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "layers": self.manifest.layers,
            "moe_layers": list(self.moe_layers),
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

    # What it becomes ----------------------------------------------------------------------------------------

    def vary(self, name: str, value: object) -> HfSpec | None:
        """The same model trained otherwise; None for what its store has decided."""
        if name not in FinetuneConfig.__dataclass_fields__:
            return None
        return replace(self, finetune=replace(self.finetune, **{name: value}))  # type: ignore[arg-type]

    def import_code(self) -> None:
        """transformers, and its module of the family. Raises ConfigError, and CapabilityError without transformers."""
        from importlib import import_module

        import_module("tierstore.hf.model").import_family(self)

    def build(
        self,
        source: ExpertSource,
        *,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        vocabulary: VocabularyPartition | None = None,
        blocks: range | None = None,
    ) -> Model:
        """The model, whose experts come from ``source``, or the stage of it that has ``blocks``. Raises ConfigError,
        CapabilityError without transformers, and ValueError for a stage without a mesh.
        """
        from importlib import import_module

        if vocabulary not in (None, VocabularyPartition()):
            raise ConfigError(
                "parallel.embedding, parallel.head: expected gathered: an imported model's stay whole"
            )
        model: Model
        if blocks is None:
            model = import_module("tierstore.hf.model").build_model(self, source, mesh=mesh, ledger=ledger)
        elif mesh is None:
            raise ValueError("a pipeline stage needs a mesh")
        else:
            build_stage = import_module("tierstore.hf.stage").build_stage
            model = build_stage(self, source, blocks, mesh=mesh, ledger=ledger)
        return model

    def first_weights(self, layer: int, expert: int) -> npt.NDArray[np.float32]:
        raise StoreError(
            f"{self.directory or self.manifest.source}: expert {expert} of layer {layer} is missing: the weights of an "
            "imported model are in its store"
        )
