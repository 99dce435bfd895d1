"""One pipeline stage of a transformers model: some of its decoder layers, with the embedding or the head.

Shapes: B sequences, T positions, V vocabulary, D width, E experts of a layer.

The forward pass is the family's own over the stage's layers; each stage computes masks and rotary tables from positions
itself. Two things that stages must agree on travel with their messages:

* The auxiliary loss is one function of all layers: its gradient for a layer depends on how often the experts of all layers
  were chosen. Each stage adds its counts to those that came with the stream; the last stage has the sums and
  sends them back with the gradients. So a stage's gradients equal those of a single process, bit for bit; until its
  backward pass, its share of the loss is zero.
* Noise of routers and dropout is drawn from one generator through all layers: its state goes with the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.hf.experts import LoadedModule, balance_loss, balance_loss_later
from tierstore.hf.model import HfModel, generator_states, set_generator_states, state_values
from tierstore.model.interface import Batch, ModelOutput
from tierstore.model.stage import StageBorder, StageLine, StagePass, no_values
from tierstore.model.transformer import sample_tokens
from tierstore.moe.source import ExpertSource
from tierstore.parallel import Mesh


class HfStage(HfModel):
    """``loaded``, which has some of the decoder layers, over ``source`` (a ``Model`` and a ``StageModule``)."""

    def __init__(self, loaded: LoadedModule, source: ExpertSource, *, mesh: Mesh, **options: Any) -> None:
        """``options``: those of ``HfModel``."""
        super().__init__(loaded, source, mesh=mesh, **options)
        self._begins, self._ends = loaded.begins, loaded.ends
        self._config = loaded.module.config
        self._line = StageLine(mesh.pipeline, self._config.hidden_size, self._compute.torch)
        #: The states of generators where the stage before left them.
        self._drawn = no_values()

    @property
    def module(self) -> nn.Module:
        """The module that a forward pass of the stage calls: without a head, the decoder alone."""
        whole = super().module
        decoder: nn.Module = self._module.base_model
        return whole if self._ends else decoder

    def made(self, output: Any) -> Tensor | None:
        made: Tensor = output.logits if self._ends else output.last_hidden_state
        return made

    @property
    def border(self) -> StageBorder:
        counts = self._aux_loss.experts + 1 if self._aux_loss.weight > 0 else 0
        return StageBorder(
            self._begins,
            self._ends,
            self._config.hidden_size,
            self._compute.torch,
            forward_values=counts + state_values(self._devices()),
            backward_values=counts,
        )

    # Passes -------------------------------------------------------------------------------------------------

    def run_stage(self, batch: Batch, given: Tensor, values: Tensor) -> StagePass:
        """One training pass. The stream is sent with the states of generators and, if a loss balances the experts, their
        counts; the counts come back with the gradients.
        """
        own = self.border.backward_values
        counts, self._drawn = values[:own], values[own:]
        output = self._entered(given, batch)
        probability_E = None
        if self._is_balanced:
            own_counts, probability_E = self._aux_loss.sums(batch.mask_BT)
            counts = counts + own_counts.cpu()
        if self._ends:
            aux_loss = None if probability_E is None else balance_loss(counts, probability_E)
            return StagePass(None, self._ended(output.logits, batch, aux_loss), values=counts)
        stream: Tensor = output.last_hidden_state
        told, aux_loss = torch.zeros_like(counts), stream.new_zeros((), dtype=torch.float32)
        if probability_E is not None:
            aux_loss = balance_loss_later(told, probability_E)
        return StagePass(stream, self._before_the_last(aux_loss), torch.cat([counts, self._drawn]), told)

    def _before_the_last(self, aux_loss: Tensor) -> ModelOutput:
        """The losses of a stage without a head: its objective is the weighted ``aux_loss``."""
        zero = torch.zeros_like(aux_loss)
        return ModelOutput(None, aux_loss, zero, self._aux_loss.weight * aux_loss, self.loads.all(), None)

    def _entered(self, given: Tensor, batch: Batch) -> Any:
        return self._called({"input_ids" if self._begins else "inputs_embeds": given}, batch)

    def _begin_drawing(self) -> None:
        if self._begins:
            super()._begin_drawing()
        else:
            set_generator_states(self._drawn, self._devices())

    def _end_drawing(self) -> None:
        self._drawn = generator_states(self._devices())

    def run(self, batch: Batch) -> ModelOutput:
        """A forward pass through all stages, without a graph; every stage returns the loss. Raises PeerError."""

        def forward(given: Tensor) -> StagePass:
            output = self._entered(given, batch)
            if self._ends:
                return StagePass(None, self._ended(output.logits, batch, None))
            return self._passed_on(output)

        part = self._line.through(batch.tokens_BT, forward)
        loss = self._line.from_last(part.loss)[0]
        return ModelOutput(loss, part.aux_loss, part.z_loss, None, part.loads, None)

    def _passed_on(self, output: Any) -> StagePass:
        """A pass without a graph through a stage without a head."""
        stream: Tensor = output.last_hidden_state
        return StagePass(stream, self._before_the_last(stream.new_zeros((), dtype=torch.float32)))

    # Text ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """At most ``count`` tokens that follow ``prompt``: the model's own end of text ends them. A collective of all
        stages: for each new token the whole text passes through them, without a key-value cache. Tokens are sampled from the
        full distribution, where transformers would leave out the least probable.
        """
        ends = self._module.generation_config.eos_token_id
        module = self.module
        training = module.training
        module.eval()
        try:
            return sample_tokens(
                self._last_logits,
                prompt,
                count,
                temperature=temperature,
                seed=seed,
                ends=ends if isinstance(ends, list) else [] if ends is None else [ends],
            )
        finally:
            module.train(training)

    def _last_logits(self, tokens: Sequence[int]) -> Tensor:
        batch_BT = torch.tensor([list(tokens)], device=self._device)
        batch = Batch(batch_BT, batch_BT)

        def forward(given: Tensor) -> StagePass:
            output = self._entered(given, batch)
            if not self._ends:
                return self._passed_on(output)
            logits: Tensor = output.logits
            zero = logits.new_zeros(())
            return StagePass(None, ModelOutput(None, zero, zero, None, self.loads.all(), logits))

        part = self._line.through(batch_BT, forward)
        last = None if part.logits is None else part.logits[0, -1].float()
        return self._line.from_last(last, self._config.vocab_size)
