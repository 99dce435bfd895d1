"""Model specifications (``ModelSpec``), from which budgets, schedules and plans are computed before a model is built.

That of the built-in model is made from its ``ModelConfig`` (``spec_of``); a model of transformers has an ``HfSpec``. A
pipeline stage of either is the same specification with fewer blocks (``ModelSpec.stage``). Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from tierstore.config import as_dict
from tierstore.errors import ConfigError
from tierstore.model.architecture import Architecture, DenseUnit
from tierstore.model.config import CheckpointActivations, ComputeDtype, ModelConfig, TieEmbeddings
from tierstore.moe.config import ExpertShape, SaveActivations
from tierstore.quant.layout import CodeFormat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tierstore.model.interface import Model
    from tierstore.model.vocabulary import VocabularyPartition
    from tierstore.moe.source import ExpertSource
    from tierstore.parallel import Mesh
    from tierstore.stats import StallLedger

_NOTHING = DenseUnit(matrices=0, others=0)
Unit = TypeVar("Unit")


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """A decoder with MoE layers, or a pipeline stage with some of its blocks.

    ``seq_len``: tokens of a sequence in training; ``positions``: its most positions, 0 if unknown. ``compute_dtype``: of
    the experts' products; ``expert_codes``: the codes of quantised expert weights, None if they are kept in that type.
    ``moe_layers``: the blocks with ``experts`` networks of ``expert_shape``. ``adapter_units``: with LoRA, the number of
    parameters of attention's pairs in each dense group, the only trained ones; empty if all are trained. ``tokenizer``:
    the directory of its files; None for a model that reads bytes. ``mixes_documents``: why documents in one sequence
    would see each other; ``no_stages``: why its blocks cannot be divided into pipeline stages; both are empty if there is
    no obstacle.

    ``layers``: its blocks, by their numbers in the ``whole`` model. ``held``: the number of micro-batches whose
    activations a stage keeps at a time.
    """

    seq_len: int
    positions: int
    vocab_size: int
    d_model: int
    compute_dtype: ComputeDtype
    expert_codes: CodeFormat | None = None
    checkpoint_activations: CheckpointActivations
    expert_activations: SaveActivations
    moe_layers: tuple[int, ...]
    experts: int
    expert_shape: ExpertShape
    architecture: Architecture
    adapter_units: tuple[int, ...] = ()
    tokenizer: Path | None = None
    mixes_documents: str = ""
    no_stages: str = ""
    layers: range
    whole: Self | None = None
    held: int = 1

    # Stages -------------------------------------------------------------------------------------------------

    @property
    def begins(self) -> bool:
        """Whether it has the embedding."""
        return self.layers.start == 0

    @property
    def ends(self) -> bool:
        """Whether it has the head."""
        return self.layers.stop == (self.whole or self).layers.stop

    def check_stages(self) -> None:
        """Raises ConfigError if its blocks cannot be divided into pipeline stages."""
        if self.whole is not None:
            raise ConfigError("parallel.stages: expected a whole model, got a stage of one")
        if self.no_stages:
            raise ConfigError(f"parallel.stages: {self.no_stages}")

    def stage(self, layers: range, *, held: int) -> Self:
        """The stage with the blocks ``layers`` of this whole model; see ``held``. If a stage lacks an end of the model,
        the group of that end has no parameters.
        """
        moe_layers = tuple(layer for layer in self.moe_layers if layer in layers)
        part = replace(self, layers=layers, moe_layers=moe_layers, whole=self, held=held)
        units = part.own(self.architecture.units, _NOTHING)
        return replace(
            part,
            architecture=replace(self.architecture, units=units, moe_layers=moe_layers),
            adapter_units=part.own(self.adapter_units, 0),
        )

    def own(self, units: Sequence[Unit], nothing: Unit) -> tuple[Unit, ...]:
        """Its part of ``units``, which has one item for each dense group of the whole model (or none at all)."""
        if not units:
            return ()
        first = units[0] if self.begins else nothing
        last = units[-1] if self.ends else nothing
        return (first, *units[1:-1][self.layers.start : self.layers.stop], last)

    # Memory -------------------------------------------------------------------------------------------------

    def activation_bytes(self, tokens: int) -> int:
        """An upper estimate of the peak memory of training passes of ``tokens``, in bytes. A stage holds the passes of
        several micro-batches, and the gradients and streams that it exchanges.
        """
        if self.whole is None:
            return self.pass_bytes(tokens, None)
        passing = 4 * tokens * self.d_model * self.compute_dtype.itemsize
        return self.held * self.pass_bytes(tokens, self.layers) + passing

    @abstractmethod
    def pass_bytes(self, tokens: int, blocks: range | None) -> int:
        """The same for one pass through ``blocks`` (None: the whole model)."""

    @abstractmethod
    def forward_bytes(self, tokens: int, *, logits: int | None = None) -> int:
        """As ``pass_bytes``, for a forward pass that keeps nothing for a backward pass; ``logits``: the tokens whose logits
        it computes (None: all).
        """

    @abstractmethod
    def layer_order_bytes(self, tokens: int, micro_batches: int) -> int:
        """The same for a step in layer order, of ``micro_batches`` of ``tokens`` each, without the kept block inputs.
        Raises ConfigError for a stage.
        """

    def _refuse_stage(self) -> None:
        if self.whole is not None:
            raise ConfigError("data.micro_order: a pipeline stage takes micro-batches only in 1F1B order")

    # Building the model -------------------------------------------------------------------------------------

    @abstractmethod
    def vary(self, name: str, value: object) -> ModelSpec | None:
        """A variant of the model with another value of ``name``; None if a run cannot choose it."""

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """The settings of the whole model that the bits of a run depend on, as JSON, for a store's state."""

    @abstractmethod
    def import_code(self) -> None:
        """Imports the code that ``build`` and the model need, so that it counts as the process's own memory. Raises
        ConfigError, CapabilityError.
        """

    @abstractmethod
    def build(
        self,
        source: ExpertSource,
        *,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        vocabulary: VocabularyPartition | None = None,
    ) -> Model:
        """The model, with experts from ``source``; for a stage, a ``StageModule`` of ``mesh``. Waits for other ranks are
        charged to ``ledger``. ``vocabulary``: the tables whose rows are divided over the data ranks. Raises ConfigError;
        ValueError for a stage without a mesh.
        """

    @abstractmethod
    def first_weights(self, layer: int, expert: int) -> npt.NDArray[np.float32]:
        """The initial weights of an expert, flat. Raises StoreError for an imported model."""


@dataclass(frozen=True, kw_only=True)
class BuiltInSpec(ModelSpec):
    """The specification of the built-in model of ``config``; made by ``spec_of``."""

    config: ModelConfig

    def pass_bytes(self, tokens: int, blocks: range | None) -> int:
        """Counts all of ``blocks`` as MoE blocks, if the model has any: what autograd saves per block, the experts'
        activations, and the scratch of one layer's backward pass with every assignment at one expert.
        """
        if blocks is not None:
            config = replace(self.config, n_layers=len(blocks), moe_every=min(self.config.moe_every, 1))
            return spec_of(config).pass_bytes(tokens, None)
        count, moe = self.config.n_layers, len(self.config.moe_layers)
        of = self._activations(tokens)
        saving = self.expert_activations is SaveActivations.SAVE
        mixture = of.mixture + (of.inner if saving else 0)
        kept = count * of.attention + moe * mixture + (count - moe) * of.dense
        if self.checkpoint_activations is CheckpointActivations.BLOCK:
            inputs = count * tokens * self.d_model * self.compute_dtype.itemsize
            # A recomputed block holds its values and, in attention, gradients of as many.
            kept = inputs + 2 * of.attention + max(mixture, of.dense)
        return kept + of.rows + of.workspace + of.head

    def forward_bytes(self, tokens: int, *, logits: int | None = None) -> int:
        of, rows = self._activations(tokens), tokens if logits is None else logits
        block = of.attention + max(of.mixture + of.rows + of.workspace, of.dense)
        return max(block, rows * self.vocab_size * (self.compute_dtype.itemsize + 4))

    def layer_order_bytes(self, tokens: int, micro_batches: int) -> int:
        """Counts the graphs of one block for all micro-batches, with the rows of its experts and the stream's values (or
        their gradients) before and after it; experts compute one micro-batch at a time.
        """
        self._refuse_stage()
        of = self._activations(tokens)
        stream = 2 * tokens * self.d_model * self.compute_dtype.itemsize
        sparse = len(self.moe_layers) == self.config.n_layers
        graph = of.attention + (of.mixture if sparse else max(of.mixture, of.dense))
        return micro_batches * (graph + of.rows + stream) + of.workspace + of.head

    def _activations(self, tokens: int) -> _Activations:
        config, width = self.config, self.compute_dtype.itemsize
        d, shape, dense = self.d_model, self.expert_shape, self.config.dense_shape
        rows = tokens * config.top_k
        shared = tokens * 4 * config.shared_expert_d_ff * width
        return _Activations(
            # Of each of two norms, its input and the normalised values in fp32, and its result; queries, keys and values;
            # the first two rotated; attention of each head, and joined.
            attention=tokens * d * (9 * width + 16),
            mixture=tokens * (2 * d * width + self.experts * 24) + shared,
            inner=rows * shape.inner_rows * width,
            dense=tokens * (dense.inner_rows + 2 * dense.d_ff) * width,
            rows=rows * 4 * d * width,
            workspace=tokens * (shape.inner_rows + 2 * shape.d_ff) * width,
            head=4 * tokens * min(self.vocab_size, 4096) * 4,
        )

    def vary(self, name: str, value: object) -> BuiltInSpec:
        varied = spec_of(self.config.vary(name, value))
        return varied if self.whole is None else varied.stage(self.layers, held=self.held)

    def settings(self) -> dict[str, object]:
        """All fields of its configuration."""
        return as_dict(self.config)

    def import_code(self) -> None:
        from importlib import import_module

        import_module("tierstore.model.transformer" if self.whole is None else "tierstore.model.stage")

    def build(
        self,
        source: ExpertSource,
        *,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        vocabulary: VocabularyPartition | None = None,
    ) -> Model:
        from tierstore.model.transformer import Transformer

        if self.whole is None:
            return Transformer(self.config, source, mesh=mesh, ledger=ledger, vocabulary=vocabulary)
        from tierstore.model.stage import StageTransformer

        if mesh is None:
            raise ValueError("a pipeline stage needs a mesh")
        return StageTransformer(
            self.config, source, layers=self.layers, mesh=mesh, ledger=ledger, vocabulary=vocabulary
        )

    def first_weights(self, layer: int, expert: int) -> npt.NDArray[np.float32]:
        """The initial weights depend only on the configuration."""
        from tierstore.moe.experts import initial_expert

        shape, layers = self.expert_shape, self.config.n_layers
        made = initial_expert(shape, seed=self.config.seed, layer=layer, expert=expert, layers=layers)
        weights: npt.NDArray[np.float32] = made.numpy()
        return weights


@dataclass(frozen=True, slots=True)
class _Activations:
    """Bytes of one pass: saved by one block for attention, router, experts (``inner``: the inputs of their activations)
    or dense network; the rows of experts; the scratch of one expert that got every token; the head.
    """

    attention: int
    mixture: int
    inner: int
    dense: int
    rows: int
    workspace: int
    head: int


@lru_cache(maxsize=256)
def spec_of(config: ModelConfig) -> BuiltInSpec:
    """The specification of the built-in model of ``config``."""
    tied = config.tie_embeddings is TieEmbeddings.TIED
    return BuiltInSpec(
        config=config,
        seq_len=config.seq_len,
        positions=config.seq_len,
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        compute_dtype=config.compute_dtype,
        checkpoint_activations=config.checkpoint_activations,
        expert_activations=config.expert_activations,
        moe_layers=config.moe_layers,
        experts=config.experts,
        expert_shape=config.expert_shape,
        architecture=config.architecture,
        mixes_documents="the built-in model has no positions by document",
        no_stages="expected 1 with model.tie_embeddings = tied: the first and the last stage would both have the table, and "
        "its gradient would be summed in another order than one process does"
        if tied
        else "",
        layers=range(config.n_layers),
    )


def divided_units(model: ModelSpec, ranks: int) -> tuple[DenseUnit, ...]:
    """The dense groups of ``model`` on one of ``ranks`` tensor-parallel ranks: its part of the matrices, the others
    whole. Nothing of an imported model is divided.
    """
    parts = ranks if isinstance(model, BuiltInSpec) and model.whole is None else 1
    units = model.architecture.units
    return tuple(DenseUnit(matrices=unit.matrices // parts, others=unit.others) for unit in units)
