"""What one pipeline stage has of a model, as a specification of its own. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError
from tierstore.model.architecture import Architecture, DenseUnit
from tierstore.model.config import CheckpointActivations, ComputeDtype, ModelConfig
from tierstore.moe.config import ExpertShape, SaveActivations
from tierstore.quant.layout import CodeFormat
from tierstore.train.config import TrainConfig
from tierstore.train.stages.blocks import stage_blocks
from tierstore.train.stages.order import micro_batches_held

if TYPE_CHECKING:
    from tierstore.model.stage import StageTransformer
    from tierstore.model.vocabulary import VocabularyPartition
    from tierstore.moe.source import ExpertSource
    from tierstore.parallel import Mesh
    from tierstore.stats import StallLedger

_NOTHING = DenseUnit(matrices=0, others=0)


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """The ``ModelSpec`` of the stage that has the blocks ``layers`` of ``model``, and activations of ``held``
    micro-batches at most. Layers keep their numbers. What a run depends on (``settings``) is the whole model.
    """

    model: ModelConfig
    layers: range
    held: int

    @property
    def seq_len(self) -> int:
        return self.model.seq_len

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def d_model(self) -> int:
        return self.model.d_model

    @property
    def compute_dtype(self) -> ComputeDtype:
        return self.model.compute_dtype

    @property
    def expert_codes(self) -> CodeFormat | None:
        return self.model.expert_codes

    @property
    def checkpoint_activations(self) -> CheckpointActivations:
        return self.model.checkpoint_activations

    @property
    def expert_activations(self) -> SaveActivations:
        return self.model.expert_activations

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.model.moe_layers if layer in self.layers)

    @property
    def experts(self) -> int:
        return self.model.experts

    @property
    def expert_shape(self) -> ExpertShape:
        return self.model.expert_shape

    @property
    def architecture(self) -> Architecture:
        """The stage's own parameters; the ends of the model that it does not have are units without any."""
        whole = self.model.architecture
        blocks = whole.units[1:-1]
        first = whole.units[0] if self.layers.start == 0 else _NOTHING
        last = whole.units[-1] if self.layers.stop == len(blocks) else _NOTHING
        units = (first, *blocks[self.layers.start : self.layers.stop], last)
        return replace(whole, units=units, moe_layers=self.moe_layers)

    @property
    def adapter_units(self) -> tuple[int, ...]:
        return self.model.adapter_units

    @property
    def tokenizer(self) -> Path | None:
        return self.model.tokenizer

    @property
    def mixes_documents(self) -> str:
        return self.model.mixes_documents

    def activation_bytes(self, tokens: int) -> int:
        """Of the micro-batches that are held at a time, with the gradients and streams that pass between stages."""
        own = replace(self.model, n_layers=len(self.layers), moe_every=1)
        passing = 4 * tokens * self.d_model * self.compute_dtype.itemsize
        return self.held * own.activation_bytes(tokens) + passing

    def layer_order_bytes(self, tokens: int, micro_batches: int) -> int:
        raise ConfigError("data.micro_order: a pipeline stage takes micro-batches in 1F1B order alone")

    def vary(self, name: str, value: object) -> StageSpec:
        """The same with another value of the model's field ``name``. Raises ConfigError."""
        return replace(self, model=self.model.vary(name, value))

    def settings(self) -> dict[str, object]:
        """The whole model's."""
        return self.model.settings()

    def import_code(self) -> None:
        """Imports what ``build`` and a step through the stages need."""
        from importlib import import_module

        import_module("tierstore.model.stage")
        import_module("tierstore.train.stages.pipeline")

    def build(
        self,
        source: ExpertSource,
        *,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        vocabulary: VocabularyPartition | None = None,
    ) -> StageTransformer:
        """The stage. Raises ValueError without a mesh."""
        from tierstore.model.stage import StageTransformer

        if mesh is None:
            raise ValueError("a pipeline stage needs a mesh")
        return StageTransformer(
            self.model, source, layers=self.layers, mesh=mesh, ledger=ledger, vocabulary=vocabulary
        )

    def first_weights(self, layer: int, expert: int) -> npt.NDArray[np.float32]:
        """As in the whole model."""
        return self.model.first_weights(layer, expert)


def stage_config(config: TrainConfig, stage: int, stages: int) -> TrainConfig:
    """``config`` as stage ``stage`` of ``stages`` runs it; the same where there is one stage.

    Raises ConfigError naming what cannot be.
    """
    model = config.model
    if stages == 1:
        return config
    if not isinstance(model, ModelConfig):
        raise ConfigError("parallel.stages: expected 1: only the built-in model can be cut into stages")
    if model.architecture.units[-1].numel <= model.d_model:
        raise ConfigError(
            "parallel.stages: expected 1 with model.tie_embeddings = tied: the first and the last stage would both have "
            "the table, and its gradient would be summed in another order than one process does"
        )
    count = config.data.micro_batches
    if count < stages:
        raise ConfigError(
            f"data.micro_batches: expected at least parallel.stages = {stages}, got {count}: with fewer, 1F1B leaves "
            "stages without work"
        )
    layers = stage_blocks(model.architecture, stages, config.parallel.stage_blocks)[stage]
    held = micro_batches_held(stage, stages, count)
    return replace(config, model=StageSpec(model=model, layers=layers, held=held))
