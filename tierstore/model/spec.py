"""What a model is before it is built: its sizes, by which budgets, schedules and plans are reckoned. Imports no torch.

``ModelConfig`` is the built-in transformer's. A model of another library has a specification of its own, made of what
its store says of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from tierstore.model.architecture import Architecture
    from tierstore.model.config import CheckpointActivations, ComputeDtype
    from tierstore.model.interface import Model
    from tierstore.model.vocabulary import VocabularyPartition
    from tierstore.moe.config import ExpertShape, SaveActivations
    from tierstore.moe.source import ExpertSource
    from tierstore.parallel import Mesh
    from tierstore.quant.layout import CodeFormat
    from tierstore.stats import StallLedger


class ModelSpec(Protocol):
    """A decoder with MoE layers, as a run is configured with it. All values are fixed once it is made."""

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence that it is trained with."""
        ...

    @property
    def positions(self) -> int:
        """The most tokens of a sequence that it can tell apart; 0 where that is not known."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def compute_dtype(self) -> ComputeDtype:
        """The type of the experts' products."""
        ...

    @property
    def expert_codes(self) -> CodeFormat | None:
        """How the experts' weights are quantised; None where they are kept in ``compute_dtype``."""
        ...

    @property
    def checkpoint_activations(self) -> CheckpointActivations: ...

    @property
    def expert_activations(self) -> SaveActivations: ...

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The blocks that hold experts: these numbers are the layers that a source is asked for."""
        ...

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        ...

    @property
    def expert_shape(self) -> ExpertShape:
        """The shape of every expert."""
        ...

    @property
    def architecture(self) -> Architecture:
        """How many parameters it has, and where."""
        ...

    @property
    def adapter_units(self) -> tuple[int, ...]:
        """With LoRA: parameters of the pairs on attention in each dense unit, which alone are trained of them. Empty where
        everything is.
        """
        ...

    @property
    def tokenizer(self) -> Path | None:
        """The directory of its tokenizer's files; None for a model that reads bytes."""
        ...

    @property
    def mixes_documents(self) -> str:
        """Why documents that share a sequence would see one another; empty where positions keep them apart."""
        ...

    def check_stages(self) -> None:
        """Raises ConfigError where its blocks cannot be divided into pipeline stages."""
        ...

    def activation_bytes(self, tokens: int, blocks: range | None = None) -> int:
        """An upper estimate of what one training pass of ``tokens`` keeps and needs at its peak, in bytes, through all of it
        or through ``blocks``.
        """
        ...

    def layer_order_bytes(self, tokens: int, micro_batches: int) -> int:
        """The same of a step in layer order, of ``micro_batches`` of ``tokens`` each, beside the block inputs that it
        keeps.
        """
        ...

    def vary(self, name: str, value: object) -> ModelSpec | None:
        """The same model, or one of its kind, with another value of ``name``; None where that is not for a run to choose."""
        ...

    def settings(self) -> dict[str, object]:
        """What the bits of a run depend on, as JSON can hold it; a store's state records it."""
        ...

    def import_code(self) -> None:
        """Imports what ``build`` and the model need: from here on it counts as the process's own memory. Raises
        ConfigError, CapabilityError.
        """
        ...

    def build(
        self,
        source: ExpertSource,
        *,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        vocabulary: VocabularyPartition | None = None,
        blocks: range | None = None,
    ) -> Model:
        """The model, whose experts come from ``source``. Waiting for other ranks is charged to ``ledger``. ``vocabulary``:
        the tables of which each data rank of ``mesh`` has some of the rows. ``blocks``: those of one pipeline stage of
        ``mesh``, which is then also a ``StageModule``. Raises ConfigError.
        """
        ...

    def first_weights(self, layer: int, expert: int) -> npt.NDArray[np.float32]:
        """The weights of an expert that was never trained, flat. Raises StoreError for a model that is not made but
        imported.
        """
        ...
