"""The built-in model: a causal decoder with MoE layers, whose experts live in a source.

Shapes: B sequences, T positions, V vocabulary, D width.

Pre-norm blocks: ``x += attention(norm(x))``, ``x += mixture(norm(x))``. In bf16 the residual stream and the
products are bf16, through explicit casts of fp32 masters; autocast chooses differently from one release to the next.
Norms, softmax, router and loss are fp32. First weights are a function of the seed and of their purpose, so that changing
one layer changes no other.

On several data ranks (``mesh``) each has a part of the global batch; only parts of a batch of tasks may differ in rows.
``objective`` is then this rank's share of the global one: the shares, and their gradients, add up. Tensor-parallel ranks
have the same tokens and parts of the parameters (``tierstore.model.config``); they compute the same gradients of
undivided parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tierstore.model.attention import (
    Attention,
    Following,
    KeyValueCache,
    RMSNorm,
    rotary_tables,
    visible_tokens,
)
from tierstore.model.config import (
    CheckpointActivations,
    ModelConfig,
    TieEmbeddings,
    check_divisible,
    divisions,
)
from tierstore.model.interface import Batch, ModelOutput, SegmentLoss, TaskSegment, joint_loss, segment_losses
from tierstore.model.tables import DividedTable, cross_entropy
from tierstore.model.vocabulary import VocabularyPartition
from tierstore.moe import ExpertSource, FeedForward, MoELayer, NoiseKey, Router, Routing
from tierstore.moe.router import LayerRouter
from tierstore.moe.seeds import keyed_generator
from tierstore.parallel import Mesh, TensorRanks
from tierstore.parallel.collectives import Charge
from tierstore.parallel.layout import Division, TableRows
from tierstore.stats import Cause, StallLedger, Tier

MixtureFactory = Callable[[int], nn.Module]
"""Makes the MoE layer of block ``layer``: a module ``(x_TD, NoiseKey) -> (y_TD, Routing)``."""


class Block(nn.Module):
    """Attention, then a mixture or a dense feed-forward network."""

    def __init__(
        self, config: ModelConfig, layer: int, mixture: nn.Module | None, tensor: TensorRanks | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(
            config.d_model, config.n_heads, seed=config.seed, layer=layer, tensor=tensor
        )
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixture = mixture
        self.ffn: FeedForward | None = None
        if mixture is None:
            self.ffn = FeedForward(config.dense_shape, seed=config.seed, name=f"ffn.{layer}", tensor=tensor)

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, key: NoiseKey, following: Following | None = None
    ) -> tuple[Tensor, Routing | None]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin, following)
        normed = self.ffn_norm(x_BTD)
        if self.ffn is not None:
            return x_BTD + self.ffn(normed), None
        assert self.mixture is not None
        y_ND, routing = self.mixture(normed.flatten(0, 1), key)
        return x_BTD + y_ND.view_as(x_BTD), routing


class Transformer(nn.Module):
    """The model of ``config`` over ``source``. This module has only the dense parameters.

    Not thread safe; a backward pass belongs to the last forward pass or to none.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: ExpertSource | None,
        *,
        mixture: MixtureFactory | None = None,
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
        layers: range | None = None,
        vocabulary: VocabularyPartition | None = None,
    ) -> None:
        """``mixture`` replaces the MoE layer (as in the plain reference); ``source`` is then unused. ``layers``: the
        blocks of a pipeline stage; the first stage also has the embedding, the last one norm and head.

        For tables in ``vocabulary``, the parameters are only this rank's rows. Waits for other ranks are charged to
        ``ledger``.
        """
        super().__init__()
        if source is None and mixture is None:
            raise ValueError("a Transformer needs an expert source, or a factory of mixtures")
        self.config = config
        check_divisible(config, 1 if mesh is None else mesh.tensor.size)
        #: The numbers of this stage's blocks.
        self.layers = range(config.n_layers) if layers is None else layers
        self._key = NoiseKey()
        self._ranks = 1 if mesh is None else mesh.data.size

        make = mixture or partial(_moe_layer, config, cast(ExpertSource, source), mesh, ledger)
        embedding, head = _divided_tables(vocabulary or VocabularyPartition(), mesh, ledger)
        self._divided_embedding, self._divided_head = embedding, head
        # The stream must start well above what the blocks add to it, or the tokens' signal is lost and learning is slow.
        # A tied embedding cannot be large (nor can its logits), so its output is scaled by sqrt(D) instead (Vaswani et
        # al. 2017, section 3.4).
        tied = config.tie_embeddings is TieEmbeddings.TIED
        self._embedding_scale = math.sqrt(config.d_model) if tied else 1.0
        self.embedding: nn.Parameter
        if self.begins:
            generator = keyed_generator(config.seed, "embedding")
            std = _head_std(config) if tied else 0.2
            self.embedding = _table(config, embedding, std=std, generator=generator)
        self.blocks = nn.ModuleList(_block(config, layer, make, mesh, ledger) for layer in self.layers)
        self.norm: RMSNorm
        if self.ends:
            self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head: nn.Parameter | None = None
        if self.ends and not tied:
            generator = keyed_generator(config.seed, "head")
            self.head = _table(config, head, std=_head_std(config), generator=generator)
        #: Tasks' own output heads, by task name.
        self.heads = nn.ParameterDict()
        _shrink_residual_weights(self, config.n_layers)
        cos, sin = rotary_tables(config.seq_len, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def begins(self) -> bool:
        """Whether the embedding is here."""
        return self.layers.start == 0

    @property
    def ends(self) -> bool:
        """Whether norm and head are here."""
        return self.layers.stop == self.config.n_layers

    def set_step(self, step: int, micro: int = 0) -> None:
        """Sets the position of training, for the router's noise. Call before each training forward pass."""
        self._key = NoiseKey(step, micro)

    @property
    def module(self) -> nn.Module:
        return self

    def stream(self, output: tuple[Tensor, Routing | None]) -> Tensor:
        return output[0]

    def made(self, output: ModelOutput) -> Tensor | None:
        return output.objective

    def suspend(self) -> NoiseKey:
        return self._key

    def resume(self, state: object) -> None:
        assert isinstance(state, NoiseKey)
        self._key = state

    def leaving(self, block: int, output: tuple[Tensor, Routing | None]) -> list[Tensor]:
        x_BTD, routing = output
        return [x_BTD] if routing is None else [x_BTD, routing.aux_loss, routing.z_loss]

    def replaced(
        self, block: int, output: tuple[Tensor, Routing | None], tensors: Sequence[Tensor]
    ) -> tuple[Tensor, Routing | None]:
        _, routing = output
        if routing is not None:
            routing = replace(routing, aux_loss=tensors[1], z_loss=tensors[2])
        return tensors[0], routing

    def run(self, batch: Batch) -> ModelOutput:
        """A forward pass with its loss. Raises ValueError for a batch with ignored targets, or whose positions restart:
        the built-in model is trained on text without document boundaries.
        """
        if batch.step_targets or batch.positions_BT is not None:
            raise ValueError("the built-in model takes batches of plain text: no masks, no documents")
        output: ModelOutput
        if batch.segments or not len(batch.tokens_BT):
            output = self(batch.tokens_BT, batch.targets_BT, batch)
        else:
            output = self(batch.tokens_BT, batch.targets_BT)
        return output

    def routers(self) -> list[LayerRouter]:
        experts, found = self.config.experts, []
        for layer, block in zip(self.layers, self.blocks, strict=True):
            assert isinstance(block, Block)
            if isinstance(block.mixture, MoELayer):
                found.append(LayerRouter(layer, block.ffn_norm, block.mixture.router, _chosen, experts))
        return found

    def end_step(self) -> None:
        """Does nothing: the model has only gradient updates."""

    def state(self) -> dict[str, bytes]:
        return {}

    def load_state(self, state: Mapping[str, bytes]) -> None:
        """Does nothing: the model has no state beside its parameters."""

    def dense_units(self) -> list[tuple[str, list[nn.Parameter]]]:
        named = zip(self.layers, self.blocks, strict=True)
        blocks = [(f"block.{layer}", list(block.parameters())) for layer, block in named]
        head = [*self.norm.parameters()] if self.ends else []
        if self.head is not None:
            head.append(self.head)
        units = [("embedding", [self.embedding] if self.begins else []), *blocks]
        return [*units, ("head", [*head, *self.heads.values()])]

    def add_heads(self, tasks: Iterable[str]) -> dict[str, nn.Parameter]:
        """Gives each of ``tasks`` its own output head; call it before ``dense_units``. Returns them by record name."""
        for task in tasks:
            head = torch.empty(self.config.vocab_size, self.config.d_model)
            generator = keyed_generator(self.config.seed, "head", task)
            nn.init.normal_(head, std=_head_std(self.config), generator=generator)
            self.heads[task] = nn.Parameter(head)
        return {f"head.{task}": head for task, head in self.heads.items()}

    def unit_divisions(self) -> list[list[Division | None]]:
        by_name = divisions(self.config)
        found = {id(parameter): by_name.get(name) for name, parameter in self.named_parameters()}
        return [[found[id(parameter)] for parameter in parameters] for _, parameters in self.dense_units()]

    def frozen_units(self) -> list[tuple[str, list[nn.Parameter]]]:
        return []

    def cast_parameters(self) -> list[nn.Parameter]:
        """Parameters whose only use in a pass is a cast to the compute type, so that a narrower copy is enough.

        The matrices of blocks. Norms and routers are used in fp32; the embedding is scaled before it is cast; the head
        may be cast once for each chunk of the loss, whose gradients are then added in fp32.
        """
        if self.config.compute_dtype.torch == torch.float32:
            return []
        matrices = ("attention.qkv", "attention.out", "ffn.inner", "ffn.down", "shared.inner", "shared.down")
        return [parameter for name, parameter in self.named_parameters() if name.endswith(matrices)]

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, tasks: Batch | None = None
    ) -> ModelOutput:
        """Runs the model on int64 ``tokens_BT`` (T at most ``seq_len``), with ``targets_BT`` of the same shape or None.
        ``tasks``: their batch, if its segments are tasks.
        """
        return self._ended(*self._through(self._embedded(tokens_BT)), targets_BT, tasks)

    def _through(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """The stream ``x`` after all blocks, balance loss and z-loss of their routers, and their loads."""
        config, cos, sin = self.config, self.cos, self.sin
        zero = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        aux_loss, z_loss = zero, zero
        loads: list[Tensor] = []
        again = config.checkpoint_activations is CheckpointActivations.BLOCK and torch.is_grad_enabled()
        for block in self.blocks:
            # The key is an argument, so that a recomputed block uses the noise of its own step.
            arguments: tuple[Any, ...] = (x, cos, sin, self._key)
            if again:
                x, routing = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x, routing = block(*arguments)
            if routing is not None:
                aux_loss = aux_loss + routing.aux_loss
                z_loss = z_loss + routing.z_loss
                loads.append(routing.load_E)
        return x, aux_loss, z_loss, tuple(loads)

    def _ended(
        self,
        x: Tensor,
        aux_loss: Tensor,
        z_loss: Tensor,
        loads: tuple[Tensor, ...],
        targets_BT: Tensor | None,
        tasks: Batch | None = None,
    ) -> ModelOutput:
        """Norm, head and loss, or logits, of the last block's output."""
        config = self.config
        head = self.embedding if self.head is None else self.head
        divided = self._divided_head
        x = self.norm(x)
        if targets_BT is None:
            logits = F.linear(x, head.to(x.dtype)) if divided is None else divided.logits(x, head)
            return ModelOutput(None, aux_loss, z_loss, None, loads, logits.to(aux_loss.dtype))
        segments: tuple[SegmentLoss, ...] = ()
        if tasks is None:
            losses = cross_entropy if divided is None else divided.cross_entropy
            loss = losses(x.flatten(0, 1), head, targets_BT.flatten())
        else:
            segments = segment_losses(tasks, partial(self._segment_loss, x, targets_BT, head))
            zero = aux_loss.new_zeros(())
            # A rank without rows takes part in the backward pass, too.
            loss = joint_loss(tasks, segments, x.sum().to(zero.dtype) * 0.0 if not segments else zero)
        share = loss if self._ranks == 1 else loss / self._ranks
        objective = share + config.aux_loss_weight * aux_loss + config.z_loss_weight * z_loss
        return ModelOutput(loss, aux_loss, z_loss, objective, loads, None, segments)

    def _segment_loss(
        self, x_BTD: Tensor, targets_BT: Tensor, head_VD: Tensor, segment: TaskSegment
    ) -> Tensor:
        own = cast(Tensor, self.heads.get(segment.task, head_VD))
        rows = slice(segment.rows.start, segment.rows.stop)
        return cross_entropy(x_BTD[rows].flatten(0, 1), own, targets_BT[rows].flatten())

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        if tokens_BT.shape[1] > self.config.seq_len:
            raise ValueError(f"sequences of {tokens_BT.shape[1]} exceed seq_len {self.config.seq_len}")
        dtype = self.config.compute_dtype.torch if self.embedding.dtype != torch.float64 else torch.float64
        if self._divided_embedding is not None:
            scale = self._embedding_scale
            return self._divided_embedding.embed(tokens_BT, self.embedding, scale=scale, dtype=dtype)
        return (F.embedding(tokens_BT, self.embedding) * self._embedding_scale).to(dtype)

    def follow(
        self, tokens_BT: Tensor, cache: KeyValueCache, mask_BS: Tensor, positions_BT: Tensor
    ) -> Tensor:
        """Logits (B, V), fp32, of the tokens after ``tokens_BT``, which follow those in ``cache`` and are added to it.

        ``mask_BS``: 1 for each token of the cache and of ``tokens_BT``, 0 for padding before the first. ``positions_BT``:
        of ``tokens_BT``, at most ``seq_len - 1``. Only for evaluation.
        """
        x = self._embedded(tokens_BT)
        cos, sin = (cast(Tensor, table)[positions_BT].unsqueeze(1) for table in (self.cos, self.sin))
        visible_BTS = visible_tokens(mask_BS, tokens_BT.shape[1])
        for block, held in zip(self.blocks, cache.layers, strict=True):
            x, _ = block(x, cos, sin, self._key, Following(held, visible_BTS))
        x = self.norm(x[:, -1])
        head = self.embedding if self.head is None else self.head
        return F.linear(x, head.to(x.dtype)).to(torch.promote_types(x.dtype, torch.float32))

    def _last_logits(self, window_BT: Tensor) -> Tensor:
        """Logits (V,), fp32, of the token after the single sequence of ``window_BT``, on the host."""
        logits: Tensor = self(window_BT).logits[0, -1].float().cpu()
        return logits

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """``count`` tokens that follow ``prompt`` (at least one token), sampled at ``temperature`` (0:
        greedy).

        The whole window of at most ``seq_len`` last tokens is recomputed for each token, without a key-value cache.
        """

        def last_logits(tokens: Sequence[int]) -> Tensor:
            window = torch.tensor([tokens[-self.config.seq_len :]], device=cast(Tensor, self.cos).device)
            return self._last_logits(window)

        training = self.training
        self.eval()
        try:
            return sample_tokens(last_logits, prompt, count, temperature=temperature, seed=seed)
        finally:
            self.train(training)


def _block(
    config: ModelConfig, layer: int, make: MixtureFactory, mesh: Mesh | None, ledger: StallLedger | None
) -> Block:
    """Block ``layer`` over the tensor ranks of ``mesh``, with an MoE layer if the model has one there."""
    mixture = make(layer) if layer in config.moe_layers else None
    tensor = None if mesh is None else mesh.tensor
    return Block(config, layer, mixture, TensorRanks(tensor, layer=layer, ledger=ledger))


def _moe_layer(
    config: ModelConfig, source: ExpertSource, mesh: Mesh | None, ledger: StallLedger | None, layer: int
) -> MoELayer:
    """The MoE layer of block ``layer``, with experts from ``source``."""
    return MoELayer(
        config.router,
        config.expert_shape,
        source,
        layer=layer,
        seed=config.seed,
        shared_d_ff=config.shared_expert_d_ff,
        save_activations=config.expert_activations,
        mesh=mesh,
        ledger=ledger,
    )


@torch.no_grad()
def _shrink_residual_weights(model: nn.Module, layers: int) -> None:
    """Scales down the initial weights that add to the residual stream, as in GPT-2."""
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.out", "ffn.down", "shared.down")):
            parameter.mul_(1.0 / math.sqrt(2.0 * layers))


def _divided_tables(
    partition: VocabularyPartition, mesh: Mesh | None, ledger: StallLedger | None
) -> tuple[DividedTable | None, DividedTable | None]:
    """Embedding and head, if their rows are divided over the data ranks of ``mesh``."""
    charge: Charge | None = None
    if ledger is not None:
        charge = partial(ledger.stall, layer=None, tier=Tier.RANKS, cause=Cause.ALL_TO_ALL)

    def divided(table: TableRows | None) -> DividedTable | None:
        if table is None:
            return None
        assert mesh is not None
        return DividedTable(table, mesh.data, charge)

    return divided(partition.embedding), divided(partition.head)


def _head_std(config: ModelConfig) -> float:
    """Standard deviation of an output head's initial weights. Above a width of 256 that of the first logits stays 0.32,
    so that the first loss is that of a uniform guess.
    """
    return min(0.02, 0.32 / math.sqrt(config.d_model))


def _table(
    config: ModelConfig, divided: DividedTable | None, *, std: float, generator: torch.Generator
) -> nn.Parameter:
    """The initial values of embedding or head, or of this rank's rows of it."""
    if divided is not None:
        return nn.Parameter(divided.first_rows(std=std, generator=generator))
    whole = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
    nn.init.normal_(whole, std=std, generator=generator)
    return whole


def _chosen(router: nn.Module, x_TD: Tensor) -> Tensor:
    assert isinstance(router, Router)
    return router.choose(x_TD)


# Text -------------------------------------------------------------------------------------------------------


def sample_tokens(
    last_logits: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float,
    seed: int,
    ends: Collection[int] = (),
) -> list[int]:
    """At most ``count`` tokens that follow ``prompt``, sampled at ``temperature`` (0: greedy); one of ``ends`` is the last.

    ``last_logits`` returns logits (V,), fp32 and on the host, of the token after those so far. Raises ValueError for an
    empty prompt.
    """
    tokens = list(prompt)
    if not tokens:
        raise ValueError("a prompt needs at least one token")
    generator = keyed_generator(seed, "generate")
    for _ in range(count):
        logits = last_logits(tokens)
        if temperature > 0:
            probability = (logits / temperature).softmax(dim=-1)
            tokens.append(int(torch.multinomial(probability, 1, generator=generator)))
        else:
            tokens.append(int(logits.argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]
