"""The part of the built-in model that one pipeline stage has: some of its blocks, with the embedding or the head.

Shapes: B sequences, T positions, V vocabulary, D width.

A stage starts from tokens or from the stream that the stage before left, and leaves the stream or the loss. What balances
its own experts is part of its own objective: the shares of all stages add up to the model's. First weights are functions
of the seed and of what they are for, so a stage makes its own and no others.

Outside of training, all stages together pass a batch from the first to the last (``run``, ``generate``); every such call
is a collective of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tierstore.model.config import ModelConfig
from tierstore.model.interface import Batch, ModelOutput
from tierstore.model.transformer import Transformer
from tierstore.model.vocabulary import VocabularyPartition
from tierstore.moe import ExpertSource
from tierstore.parallel import Mesh, RankGroup
from tierstore.stats import StallLedger


@dataclass(frozen=True, slots=True)
class StagePass:
    """One forward pass through a stage: the ``stream`` that it leaves for the next one (None: it is the last), and its
    part of the model's output. Without a head that has no loss, and an objective of balance losses alone.
    """

    stream: Tensor | None
    part: ModelOutput


class StageTransformer(Transformer):
    """The blocks ``layers`` of the model of ``config``, and what comes before the first or after the last of all.

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
        self._pipeline = mesh.pipeline

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

    def run(self, batch: Batch) -> ModelOutput:
        """A forward pass through all stages, without a graph; all of them get the loss. Raises PeerError, ValueError."""
        part = self._passed_on(batch.tokens_BT, batch.targets_BT)
        told = torch.zeros(1, dtype=torch.float64)
        if part.loss is not None:
            told[0] = float(part.loss)
        self._pipeline.all_reduce(told).wait()
        loss = told[0].to(torch.float32)
        return ModelOutput(loss, part.aux_loss, part.z_loss, None, part.loads, None)

    def _last_logits(self, window_BT: Tensor) -> Tensor:
        part = self._passed_on(window_BT, None)
        logits = torch.zeros(self.config.vocab_size)
        if part.logits is not None:
            logits.copy_(part.logits[0, -1])
        self._pipeline.all_reduce(logits).wait()
        return logits

    @torch.no_grad()
    def _passed_on(self, tokens_BT: Tensor, targets_BT: Tensor | None) -> ModelOutput:
        """This stage's part of a forward pass: it waits for the stages before it, and then sends to the next one."""
        config, group = self.config, self._pipeline
        shape = (*tokens_BT.shape, config.d_model)
        given = tokens_BT
        for sender in range(group.rank):
            received = sender == group.rank - 1
            arriving = tokens_BT.new_empty(shape if received else (0, *shape[1:]), dtype=self.stream_dtype)
            _hand_on(group, sender, arriving, arriving[:0])
            given = arriving
        output: StagePass = self(given, targets_BT)
        for sender in range(group.rank, group.size - 1):
            assert output.stream is not None
            stream = output.stream.contiguous()
            _hand_on(group, sender, stream[:0], stream if sender == group.rank else stream[:0])
        return output.part

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.config.d_model

    @property
    def stream_dtype(self) -> torch.dtype:
        """The type of the residual stream."""
        return self.config.compute_dtype.torch


def _hand_on(group: RankGroup, sender: int, out_rows: Tensor, in_rows: Tensor) -> None:
    """Stage ``sender`` sends ``in_rows`` to the stage behind it, where they are ``out_rows``. A collective of all."""
    out_splits, in_splits = [0] * group.size, [0] * group.size
    out_splits[sender] = out_rows.shape[0]
    in_splits[sender + 1] = in_rows.shape[0]
    group.all_to_all(out_rows, in_rows, out_splits, in_splits).wait()
