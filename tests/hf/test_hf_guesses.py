"""Guesses of the next layers' experts on wrapped models: each family's own router, and its own rule."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES, FusedExperts, copy_dense, make_config, plain_model

from tierstore.hf.loading import build_module
from tierstore.hf.model import HfModel
from tierstore.model.config import CheckpointActivations, ComputeDtype
from tierstore.model.interface import Batch
from tierstore.moe.guessing import RouterGuesses
from tierstore.train.config import FinetuneConfig

LAYERS = 3


class Listener:
    """Looks a layer ahead, and keeps what it is offered."""

    def __init__(self) -> None:
        self.offers: dict[tuple[int, int], list[int]] = {}
        self.passed: set[int] = set()

    def reach(self, layer: int) -> list[int]:
        again = layer in self.passed
        self.passed.add(layer)
        return [] if again or layer + 1 >= LAYERS else [layer + 1]

    def offer(self, source: int, layer: int, chosen_E: np.ndarray) -> None:  # type: ignore[type-arg]
        self.offers[source, layer] = chosen_E.tolist()


def wrapped(family: str, *, still: bool, **options: Any) -> HfModel:
    """A wrapped model; ``still``: what its layers add to the residual stream is nothing."""
    config = make_config(family, num_hidden_layers=LAYERS)
    plain = plain_model(config)
    if still:
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                outputs = ("o_proj.weight", "o_proj.bias", "out_proj.weight", "down_proj", "down_proj.weight")
                if name.endswith((*outputs, "down_proj_bias")):
                    parameter.zero_()
                if "post_attention_layernorm" in name:  # each layer's own norm is what a guess goes through
                    parameter.uniform_(0.5, 1.5)
    loaded = build_module(make_config(family, num_hidden_layers=LAYERS), torch.float32)
    copy_dense(plain, loaded)
    finetune = FinetuneConfig(**options)
    return HfModel(loaded, FusedExperts(plain), compute=ComputeDtype.FP32, finetune=finetune)


def batch() -> Batch:
    both = torch.randint(1, 128, (2, 13), generator=torch.Generator().manual_seed(1))
    return Batch(both[:, :-1].clone(), both[:, 1:].clone())


@pytest.mark.parametrize("family", FAMILIES)
def test_where_layers_add_nothing_every_guess_is_right(family: str) -> None:
    model, listener = wrapped(family, still=True), Listener()
    guesses = RouterGuesses(model.routers(), listener)
    assert guesses.nbytes == 0
    model.module.eval()
    with torch.no_grad():
        model.run(batch())
        listener.passed.clear()
        model.run(batch())
    layers = [router.layer for router in model.routers()]
    assert sorted(listener.offers) == [(layer, layer + 1) for layer in layers[:-1]]
    for (_, layer), counts in listener.offers.items():
        load = model.loads.by_layer[layer]
        assert counts == load.tolist()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "phimoe"])
def test_no_bit_changes_and_what_is_computed_again_offers_nothing(family: str) -> None:
    """The balance loss hears of routers, not of their copies; noise is drawn as without guesses."""
    found = []
    for guessing in (False, True):
        torch.manual_seed(5)
        model = wrapped(family, still=False, checkpoint_activations=CheckpointActivations.BLOCK)
        model.module.train()
        listener = Listener()
        if guessing:
            RouterGuesses(model.routers(), listener)
        for step in range(2):
            model.set_step(step)
            model.module.zero_grad()
            listener.passed.clear()
            objective = model.run(batch()).objective
            offered = dict(listener.offers)
            objective.backward()
            assert listener.offers == offered
        assert bool(listener.offers) is guessing
        found.append([objective, *(parameter.grad for parameter in model.module.parameters())])
    for plain, guessed in zip(*found, strict=True):
        assert (plain is None and guessed is None) or torch.equal(plain, guessed)


#: Families whose routers choose by a bias, in groups, or behind a norm that takes the mean out.
UNFOLDED = {"deepseek_v3", "glm4_moe", "phimoe", "gpt_oss"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_routers_become_one_matrix_where_that_chooses_as_they_do(
    family: str, dtype: torch.dtype
) -> None:
    routers = wrapped(family, still=False).routers()
    with torch.no_grad():
        for router in routers:
            router.norm.to(dtype)
            router.router.to(dtype)
            assert (router.folded(dtype) is None) == (family in UNFOLDED)
    assert FAMILIES.keys() > UNFOLDED
