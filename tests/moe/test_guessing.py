"""Guesses of the next layers' experts on the built-in model: an oracle, and what the copies are taken of."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tierstore.model.config import CheckpointActivations, ModelConfig
from tierstore.model.interface import Batch
from tierstore.model.transformer import Block, Transformer
from tierstore.moe import InMemoryExperts, MoELayer
from tierstore.moe.config import RouterNoise
from tierstore.moe.guessing import PASS_DRIFT, RouterGuesses, StreamDrift

LAYERS, EXPERTS = 4, 8


class Listener:
    """Looks ``depth`` layers ahead, and keeps what it is offered."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.recomputes = False
        self.offers: dict[tuple[int, int], list[int]] = {}

    def reach(self, layer: int) -> list[int]:
        if self.recomputes:
            return []
        return [ahead for ahead in range(layer + 1, layer + 1 + self.depth) if ahead < LAYERS]

    def offer(self, source: int, layer: int, chosen_E: np.ndarray) -> None:  # type: ignore[type-arg]
        self.offers[source, layer] = chosen_E.tolist()


def make(**changes: object) -> Transformer:
    options = {"d_model": 16, "n_heads": 2, "seq_len": 8, "d_ff": 8, "experts": EXPERTS, "n_layers": LAYERS}
    config = ModelConfig(**{**options, **changes})  # type: ignore[arg-type]
    source = InMemoryExperts(config.expert_shape, layers=config.moe_layers, experts=EXPERTS)
    return Transformer(config, source)


def blocks_of(model: Transformer) -> Iterator[tuple[Block, MoELayer]]:
    for block in model.blocks:
        yield block, block.mixture


def batch(rows: int = 1) -> Batch:
    tokens = torch.randint(0, 256, (rows, 9), generator=torch.Generator().manual_seed(3))
    return Batch(tokens[:, :-1], tokens[:, 1:])


def counts_of(model: Transformer, layer: int, stream_TD: Tensor) -> list[int]:
    """How often ``layer`` would choose each expert for ``stream_TD``, in the formulas of the two modules."""
    block, mixture = list(blocks_of(model))[layer]
    with torch.no_grad():
        mean = stream_TD.square().mean(dim=1, keepdim=True)
        normed = stream_TD / (mean + model.config.norm_eps).sqrt() * block.ffn_norm.weight
        chosen = (normed @ mixture.router.weight.T).topk(2).indices
    return torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_a_guess_is_what_the_router_chooses_for_an_earlier_stream(depth: int) -> None:
    model, listener = make(), Listener(depth)
    streams: dict[int, Tensor] = {}
    guesses = RouterGuesses(model.routers(), listener)
    for layer, (block, _) in enumerate(blocks_of(model)):
        # Keywords: the hook is told first, and gives nothing back.
        block.ffn_norm.register_forward_pre_hook(
            lambda norm, given, layer=layer: streams.update({layer: given[0].detach().flatten(0, 1)})
        )
    with torch.no_grad():
        model.run(batch())
        assert not listener.offers, "the copies of the coming layers are taken when they are passed"
        model.run(batch())
    expected = {
        (layer, ahead): counts_of(model, ahead, streams[layer])
        for layer in range(LAYERS)
        for ahead in listener.reach(layer)
    }
    assert listener.offers == expected
    assert all(sum(counts) == 2 * 8 for counts in listener.offers.values())
    numel = (LAYERS - 1) * (EXPERTS + 1) * 16
    assert guesses.nbytes == 4 * numel


def test_where_layers_add_nothing_every_guess_is_right() -> None:
    model, listener = make(), Listener(3)
    RouterGuesses(model.routers(), listener)
    for block, mixture in blocks_of(model):
        torch.nn.init.zeros_(block.attention.out)
        for weights in mixture.source.masters.values():
            weights.zero_()
    with torch.no_grad():
        model.run(batch())
        loads = model.run(batch()).loads
    for (_, layer), counts in listener.offers.items():
        assert counts == loads[layer].tolist()


def test_copies_are_of_the_pass_before_and_as_old_as_a_step_at_most() -> None:
    """In training a guess is one step old; of what is not trained, the copy is taken once."""
    model, listener = make(n_layers=2), Listener()
    RouterGuesses(model.routers(), listener)
    (block, _), (_, second) = blocks_of(model)
    streams: list[Tensor] = []
    block.ffn_norm.register_forward_pre_hook(lambda norm, given: streams.append(given[0].detach()[0]))

    def offered(*, training: bool) -> list[int]:
        with torch.set_grad_enabled(training):
            model.run(batch())
        return listener.offers[0, 1]

    def step() -> None:
        with torch.no_grad():
            second.router.weight.neg_()

    model.run(batch())
    one = counts_of(model, 1, streams[-1])
    step()
    other = counts_of(model, 1, streams[-1])
    assert one != other
    assert offered(training=True) == one, "as it was before the step"
    assert offered(training=True) == other, "the second micro-batch"
    step()
    assert offered(training=False) == other
    assert offered(training=False) == one, "the first pass without gradients has taken a copy"
    step()
    assert [offered(training=False) for _ in range(2)] == [one] * 2, "nothing is trained meanwhile"


@pytest.mark.parametrize("again", CheckpointActivations)
def test_no_bit_changes(again: CheckpointActivations) -> None:
    """With noise, which is not guessed, and in layers that are computed again."""
    found = []
    for guessing in (False, True):
        model = make(router_noise=RouterNoise.JITTER, router_noise_std=0.1, checkpoint_activations=again)
        model.train()
        guesses = RouterGuesses(model.routers(), Listener(2)) if guessing else None
        gradients = []
        for step in range(2):
            model.set_step(step)
            model.zero_grad()
            output = model.run(batch())
            output.objective.backward()
            gradients += [parameter.grad for parameter in model.parameters()]
        found.append([output.objective, *gradients])
        if guesses is not None:
            guesses.remove()
            assert not any(module._forward_pre_hooks for module in model.modules())
    for plain, guessed in zip(*found, strict=True):
        assert torch.equal(plain, guessed)


def test_a_layer_that_is_computed_again_offers_nothing() -> None:
    model, listener = make(), Listener()
    RouterGuesses(model.routers(), listener)
    model.run(batch())
    listener.recomputes = True
    model.run(batch())
    assert not listener.offers


def test_frozen_routers_guess_from_one_matrix_each() -> None:
    model, listener = make(), Listener(2)
    plain = Listener(2)
    guesses = RouterGuesses(model.routers(), listener, frozen=torch.float32)
    RouterGuesses(model.routers(), plain)
    with torch.no_grad():
        model.run(batch())
        assert listener.offers
        assert not plain.offers, "no router has been passed"
        model.run(batch())
    assert listener.offers == plain.offers
    assert guesses.nbytes == 4 * (LAYERS - 1) * EXPERTS * 16


def test_what_earlier_tokens_were_given_on_their_way_is_expected_of_the_next_one() -> None:
    """Layers that add the same to every token: each guess is right after a prompt, and without one once two sequences have
    shown two tokens each.
    """
    model, listener = make(), Listener(2)
    guesses = RouterGuesses(model.routers(), listener, frozen=torch.float32)
    generator = torch.Generator().manual_seed(5)
    adds = torch.randn(LAYERS, 16, generator=generator)

    def one_pass(drift: StreamDrift | None, tokens: int) -> list[bool]:
        """Whether each guess is what the layer chooses then."""
        stream = torch.randn(2, tokens, 16, generator=generator)
        listener.offers.clear()
        token = PASS_DRIFT.set(drift)
        chosen = {}
        try:
            for layer in range(LAYERS):
                stream = stream + adds[layer]
                guesses.offer(layer, stream)
                chosen[layer] = counts_of(model, layer, stream.flatten(0, 1))
        finally:
            PASS_DRIFT.reset(token)
        return [counts == chosen[layer] for (_, layer), counts in listener.offers.items()]

    drift = StreamDrift()
    assert not all(one_pass(drift, 6)), "a prompt is guessed from its plain streams"
    assert any(any(counts) for counts in listener.offers.values())
    assert one_pass(drift, 1) == [True] * 5
    assert not all(one_pass(None, 1)), "without the average"
    other = StreamDrift()
    for _ in range(2):
        one_pass(other, 1)
        assert not any(any(counts) for counts in listener.offers.values()), "of two tokens nothing is guessed"
    assert one_pass(other, 1) == [True] * 5
    assert one_pass(drift, 1) == [True] * 5
