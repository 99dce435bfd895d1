"""Tiny models to be served, their experts in memory: wrapped ones beside transformers' own, and the built-in one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tiny_families import FusedExperts, copy_dense, make_config, plain_model
from torch import Tensor

from tierstore.hf.describing import parse_config
from tierstore.hf.experts import ExpertLayer, ExpertLoads, bind
from tierstore.hf.loading import build_module
from tierstore.model.config import ComputeDtype, ModelConfig
from tierstore.model.transformer import Transformer
from tierstore.moe.source import ExpertLease, ExpertSource, ExpertSourceRef, InMemoryExperts
from tierstore.prefetch.predictor import Counts
from tierstore.prefetch.program import GuessCounts
from tierstore.serve.batch import BatchRunner, LockstepPasses
from tierstore.serve.experts import ServingPhase
from tierstore.serve.model import BuiltInModel, ServedModel, WrappedModel


class MemoryExperts:
    """``source`` as ``CachedExperts``: what was begun and asked for, and an error on request."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self.begun: list[tuple[ServingPhase, int]] = []
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        #: What was told of who asks, by pass over a layer.
        self.told: list[dict[int, int]] = []
        #: Raised once, by the pass over this layer.
        self.failing: tuple[int, Exception] | None = None

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        self.begun.append((phase, tokens))

    def set_requesters(self, requesters: Mapping[int, int]) -> None:
        self.told.append(dict(requesters))

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        self.asked.append((layer, tuple(experts)))
        if self.failing is not None and self.failing[0] == layer:
            error, self.failing = self.failing[1], None
            raise error
        yield from self._source.forward(layer, experts)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        raise AssertionError("serving has no backward passes")

    def reach(self, layer: int) -> Sequence[int]:
        return ()

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        raise AssertionError("nothing was reached")

    @property
    def guesses(self) -> GuessCounts:
        return GuessCounts()


class Served:
    """A model, its experts and where its passes meet: what runners are made of."""

    def __init__(self, model: ServedModel, experts: MemoryExperts, slot: ExpertSourceRef) -> None:
        self.model = model
        self.experts = experts
        slot.target = experts
        self.passes = LockstepPasses(slot)

    def runner(self, kind: type[BatchRunner], *, sequences: int = 8) -> BatchRunner:
        return kind(self.model, self.experts, self.passes, sequences=sequences)


def wrapped(
    family: str,
    dtype: torch.dtype = torch.float32,
    *,
    context: int = 0,
    written: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Served]:
    """transformers' own model, and the same served, with these keys ``written`` into its config.json."""
    config = make_config(family, **options)
    plain = plain_model(config, dtype).eval()
    slot = ExpertSourceRef()
    loaded = build_module(parse_config({**json.loads(config.to_json_string()), **(written or {})}), dtype)
    copy_dense(plain, loaded)
    for number, module in loaded.experts_at.items():
        bind(module, ExpertLayer(number, loaded.shape, loaded.experts, slot, loads=ExpertLoads()))
    loaded.module.eval()
    experts = MemoryExperts(FusedExperts(plain))
    return plain, Served(WrappedModel(loaded.module, context=context), experts, slot)


def built_in(compute: ComputeDtype = ComputeDtype.FP32, *, context: int = 0) -> tuple[Transformer, Served]:
    """The built-in transformer, and the same served."""
    config = ModelConfig(
        vocab_size=61,
        seq_len=48,
        n_layers=2,
        d_model=32,
        n_heads=4,
        d_ff=48,
        experts=8,
        top_k=2,
        compute_dtype=compute,
    )
    slot = ExpertSourceRef()
    model = Transformer(config, slot).eval()
    source = InMemoryExperts(
        config.expert_shape, layers=config.moe_layers, experts=config.experts, compute=compute.torch
    )
    return model, Served(BuiltInModel(model, context=context), MemoryExperts(source), slot)


def drawn(lengths: Sequence[int], *, vocabulary: int = 128, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths; their tokens are no padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def greedy(
    runner: BatchRunner, prompts: Sequence[Sequence[int]], count: int
) -> list[tuple[list[int], Tensor]]:
    """For each prompt ``count`` tokens and the logits (count, V) that they were chosen by; all leave."""
    found = {number: [logits_V] for number, logits_V in runner.join(prompts).items()}
    for _ in range(count - 1):
        tokens = {number: int(logits[-1].argmax()) for number, logits in found.items()}
        for number, logits_V in runner.step(tokens).items():
            found[number].append(logits_V)
    for number in found:
        runner.leave(number)
    return [
        ([int(each.argmax()) for each in logits], torch.stack(logits)) for _, logits in sorted(found.items())
    ]


def generated(plain: Any, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], Tensor]]:
    """The same by transformers' own ``generate``, left padded."""
    longest = max(len(prompt) for prompt in prompts)
    pad = plain.config.pad_token_id
    tokens = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = plain.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=pad,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits_BNV = torch.stack(made.logits, dim=1)
    return [(row[longest:].tolist(), logits) for row, logits in zip(made.sequences, logits_BNV, strict=True)]
