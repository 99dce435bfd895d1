"""The interface of a pipeline stage of any model, and the stages of the built-in model.

Shapes: B sequences, T positions, V vocabulary, D width.

A stage starts from tokens or from the previous stage's stream, and returns the stream or the loss. Its objective includes
the balance terms of its own experts: the objectives of all stages add up to the model's. First weights are functions of
the seed and of their purpose, so a stage makes only its own.

Outside of training, all stages together pass a batch from the first to the last (``StageLine``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tierstore.model.config import ModelConfig
from tierstore.model.interface import Batch, ModelOutput
from tierstore.model.transformer import Transformer
from tierstore.model.vocabulary import VocabularyPartition
from tierstore.moe import ExpertSource
from tierstore.parallel import Mesh, RankGroup
from tierstore.stats import StallLedger


def no_values() -> Tensor:
    """The values of a message's companion, if a model has none."""
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class StageBorder:
    """The messages of a stage. ``begins``: it starts from tokens; ``ends``: it computes the loss; otherwise it receives
    and sends a stream (B, T, ``width``) of ``dtype``. With each stream, ``forward_values`` int64 values go to the next
    stage; with its gradient, ``backward_values`` go to the previous one.
    """

    begins: bool
    ends: bool
    width: int
    dtype: torch.dtype
    forward_values: int = 0
    backward_values: int = 0


@dataclass(frozen=True, slots=True)
class StagePass:
    """One forward pass through a stage: the ``stream`` for the next stage (None on the last one), and its part of the
    model's output: without a head it has no loss, and only the balance terms as objective.

    ``values``: sent to the next stage beside the stream; those of the last stage go back through all others, which get
    them in ``told`` before the backward pass.
    """

    stream: Tensor | None
    part: ModelOutput
    values: Tensor = field(default_factory=no_values)
    told: Tensor = field(default_factory=no_values)


class StageModule(Protocol):
    """The interface of a stage for its pipeline."""

    @property
    def border(self) -> StageBorder: ...

    def run_stage(self, batch: Batch, given: Tensor, values: Tensor) -> StagePass:
        """One forward pass of ``batch`` from ``given``, its tokens or the stream; ``values`` came with the stream (the
        first stage gets zeros).
        """
        ...


class StageLine:
    """Passes a batch through all stages of a pipeline, of which this rank has one, without a graph.

    Each call is a collective of all of them. Raises PeerError.
    """

    def __init__(self, group: RankGroup, width: int, dtype: torch.dtype) -> None:
        self._group = group
        self._width = width
        self._dtype = dtype

    @torch.no_grad()
    def through(self, tokens_BT: Tensor, forward: Callable[[Tensor], StagePass]) -> ModelOutput:
        """This stage's part of a forward pass of ``tokens_BT``: ``forward`` gets the tokens, or the stream from the
        previous stage.
        """
        group, shape = self._group, (*tokens_BT.shape, self._width)
        given = tokens_BT
        for sender in range(group.rank):
            received = sender == group.rank - 1
            arriving = tokens_BT.new_empty(shape if received else (0, *shape[1:]), dtype=self._dtype)
            _hand_on(group, sender, arriving, arriving[:0])
            given = arriving
        output = forward(given)
        for sender in range(group.rank, group.size - 1):
            assert output.stream is not None
            stream = output.stream.contiguous()
            _hand_on(group, sender, stream[:0], stream if sender == group.rank else stream[:0])
        return output.part

    def from_last(self, own: Tensor | None, numel: int = 1) -> Tensor:
        """Sends the ``numel`` values of ``own``, which only the last stage has, to all stages: fp32, on the host."""
        told = torch.zeros(numel)
        if own is not None:
            told.copy_(own.detach().reshape(-1))
        self._group.all_reduce(told).wait()
        return told


class StageTransformer(Transformer):
    """The blocks ``layers`` of the model of ``config``, with the embedding or the head, if it has that end.

    A call takes int64 ``tokens_BT`` or the stream (B, T, D), and in the last stage ``targets_BT``.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: ExpertSource,
        *,
        layers: range,
        mesh: Mesh,
        ledger: StallLedger | None = None,
        vocabulary: VocabularyPartition | None = None,
    ) -> None:
        super().__init__(config, source, mesh=mesh, ledger=ledger, layers=layers, vocabulary=vocabulary)
        self.border = StageBorder(self.begins, self.ends, config.d_model, config.compute_dtype.torch)
        self._line = StageLine(mesh.pipeline, self.border.width, self.border.dtype)

    def made(self, output: StagePass) -> Tensor | None:  # type: ignore[override]
        return output.part.objective if output.stream is None else output.stream

    def forward(self, given: Tensor, targets_BT: Tensor | None = None) -> StagePass:  # type: ignore[override]
        """One pass through the stage."""
        x, aux_loss, z_loss, loads = self._through(self._embedded(given) if self.begins else given)
        if self.ends:
            return StagePass(None, self._ended(x, aux_loss, z_loss, loads, targets_BT))
        config = self.config
        objective = config.aux_loss_weight * aux_loss + config.z_loss_weight * z_loss
        return StagePass(x, ModelOutput(None, aux_loss, z_loss, objective, loads, None))

    def run_stage(self, batch: Batch, given: Tensor, values: Tensor) -> StagePass:
        """One pass of ``batch``; no values go beside its stream."""
        output: StagePass = self(given, batch.targets_BT if self.ends else None)
        return output

    def run(self, batch: Batch) -> ModelOutput:
        """A forward pass through all stages, without a graph; all of them get the loss. Raises PeerError, ValueError."""
        part = self._line.through(batch.tokens_BT, lambda given: self(given, batch.targets_BT))
        loss = self._line.from_last(part.loss)[0]
        return ModelOutput(loss, part.aux_loss, part.z_loss, None, part.loads, None)

    def _last_logits(self, window_BT: Tensor) -> Tensor:
        part = self._line.through(window_BT, self)
        last = None if part.logits is None else part.logits[0, -1]
        return self._line.from_last(last, self.config.vocab_size)


def _hand_on(group: RankGroup, sender: int, out_rows: Tensor, in_rows: Tensor) -> None:
    """Stage ``sender`` sends ``in_rows`` to the next stage, which receives ``out_rows``. A collective of all stages."""
    out_splits, in_splits = [0] * group.size, [0] * group.size
    out_splits[sender] = out_rows.shape[0]
    in_splits[sender + 1] = in_rows.shape[0]
    group.all_to_all(out_rows, in_rows, out_splits, in_splits).wait()
