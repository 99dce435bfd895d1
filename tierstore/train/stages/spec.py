"""What one pipeline stage has of a model, as a specification of its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError
from tierstore.model.architecture import Architecture, DenseUnit
from tierstore.model.config import CheckpointActivations, ComputeDtype
from tierstore.model.spec import ModelSpec
from tierstore.moe.config import ExpertShape, SaveActivations
from tierstore.quant.layout import CodeFormat
from tierstore.train.config import TrainConfig
from tierstore.train.stages.blocks import stage_blocks
from tierstore.train.stages.order import micro_batches_held

if TYPE_CHECKING:
    from tierstore.model.interface import Model
    from tierstore.model.vocabulary import VocabularyPartition
    from tierstore.moe.source import ExpertSource
    from tierstore.parallel import Mesh
    from tierstore.stats import StallLedger

_NOTHING = DenseUnit(matrices=0, others=0)
Value = TypeVar("Value")
Unit = TypeVar("Unit")


class _OfModel(Generic[Value]):
    """A property of a stage that is the whole model's, under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stage: StageSpec, owner: type | None = None) -> Value:
        value: Value = getattr(stage.model, self._name)
        return value


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """The ``ModelSpec`` of the stage that has the blocks ``layers`` of ``model``, and activations of ``held``
    micro-batches at most. Layers keep their numbers. What a run depends on (``settings``) is the whole model.
    """

    model: ModelSpec
    layers: range
    held: int

    seq_len = _OfModel[int]()
    positions = _OfModel[int]()
    vocab_size = _OfModel[int]()
    d_model = _OfModel[int]()
    compute_dtype = _OfModel[ComputeDtype]()
    expert_codes = _OfModel[CodeFormat | None]()
    checkpoint_activations = _OfModel[CheckpointActivations]()
    expert_activations = _OfModel[SaveActivations]()
    experts = _OfModel[int]()
    expert_shape = _OfModel[ExpertShape]()
    tokenizer = _OfModel[Path | None]()
    mixes_documents = _OfModel[str]()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.model.moe_layers if layer in self.layers)

    @property
    def architecture(self) -> Architecture:
        """The stage's own parameters; the ends of the model that it does not have are units without any."""
        whole = self.model.architecture
        return replace(whole, units=self.own(whole.units, _NOTHING), moe_layers=self.moe_layers)

    @property
    def adapter_units(self) -> tuple[int, ...]:
        return self.own(self.model.adapter_units, 0)

    @property
    def begins(self) -> bool:
        """Whether it has the embedding."""
        return self.layers.start == 0

    @property
    def ends(self) -> bool:
        """Whether it has the head."""
        return self.layers.stop == len(self.model.architecture.units) - 2

    def own(self, units: Sequence[Unit], nothing: Unit) -> tuple[Unit, ...]:
        """Of ``units`` of the whole model, if there are any, the stage's."""
        if not units:
            return ()
        first = units[0] if self.begins else nothing
        last = units[-1] if self.ends else nothing
        return (first, *units[1:-1][self.layers.start : self.layers.stop], last)

    def check_stages(self) -> None:
        """Raises ConfigError: it is one already."""
        raise ConfigError("parallel.stages: expected a whole model, got a stage of one")

    def activation_bytes(self, tokens: int, blocks: range | None = None) -> int:
        """Of the micro-batches that are held at a time, with the gradients and streams that pass between stages."""
        passing = 4 * tokens * self.d_model * self.compute_dtype.itemsize
        return self.held * self.model.activation_bytes(tokens, blocks or self.layers) + passing

    def layer_order_bytes(self, tokens: int, micro_batches: int) -> int:
        raise ConfigError("data.micro_order: a pipeline stage takes micro-batches in 1F1B order alone")

    def vary(self, name: str, value: object) -> StageSpec | None:
        """A stage of the same model with another value of ``name``. Raises ConfigError."""
        varied = self.model.vary(name, value)
        return None if varied is None else replace(self, model=varied)

    def settings(self) -> dict[str, object]:
        """The whole model's."""
        return self.model.settings()

    def import_code(self) -> None:
        """Imports what ``build`` and a step through the stages need."""
        from importlib import import_module

        self.model.import_code()
        import_module("tierstore.train.stages.pipeline")

    def build(
        self,
        source: ExpertSource,
        *,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        vocabulary: VocabularyPartition | None = None,
        blocks: range | None = None,
    ) -> Model:
        """The stage, which is a ``StageModule``. Raises ValueError without a mesh."""
        return self.model.build(
            source, mesh=mesh, ledger=ledger, vocabulary=vocabulary, blocks=blocks or self.layers
        )

    def first_weights(self, layer: int, expert: int) -> npt.NDArray[np.float32]:
        """As in the whole model."""
        return self.model.first_weights(layer, expert)


def whole_model(model: ModelSpec) -> ModelSpec:
    """The model that ``model`` is a stage of, or itself."""
    return model.model if isinstance(model, StageSpec) else model


def stage_config(config: TrainConfig, stage: int, stages: int) -> TrainConfig:
    """``config`` as stage ``stage`` of ``stages`` runs it; the same where there is one stage.

    Raises ConfigError naming what cannot be.
    """
    model = config.model
    if stages == 1:
        return config
    model.check_stages()
    count = config.data.micro_batches
    if count < stages:
        raise ConfigError(
            f"data.micro_batches: expected at least parallel.stages = {stages}, got {count}: with fewer, 1F1B leaves "
            "stages without work"
        )
    layers = stage_blocks(model.architecture, stages, config.parallel.stage_blocks)[stage]
    held = micro_batches_held(stage, stages, count)
    return replace(config, model=StageSpec(model=model, layers=layers, held=held))
