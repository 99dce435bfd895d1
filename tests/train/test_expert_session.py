"""Experts of a plain torch module from a store: what plain torch with AdamW computes, and errors for loops gone wrong."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from torch import Tensor, nn

from tierstore._native import StepClock
from tierstore.errors import BudgetError, StoreFormatError
from tierstore.model.store_schema import expert_key
from tierstore.moe.config import Activation, ExpertShape
from tierstore.moe.experts import feed_forward, initial_expert
from tierstore.store import AdamWConfig, MomentFormat
from tierstore.train import ExpertSession, NonFiniteError, StepError, open_experts

SHAPE, LAYERS, EXPERTS, TOP_K = ExpertShape(8, 12), 2, 6, 2
TIGHT = "40KiB"


class Mixture(nn.Module):
    """The same mixture with its experts in a store, or as parameters."""

    def __init__(self, layer: int, tiered: ExpertSession | None) -> None:
        super().__init__()
        self.router = nn.Linear(SHAPE.d_model, EXPERTS, bias=False)
        self.layer, self.tiered = layer, tiered
        if tiered is None:
            self.experts = nn.ParameterList(
                initial_expert(SHAPE, seed=0, layer=layer, expert=expert, layers=LAYERS)
                for expert in range(EXPERTS)
            )

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TK, expert_TK = self.router(x_TD).softmax(-1).topk(TOP_K)
        if self.tiered is not None:
            return x_TD + self.tiered.compute(self.layer, x_TD, expert_TK, weight_TK)
        y_TD = torch.zeros_like(x_TD)
        for expert, flat in enumerate(self.experts):
            views = SHAPE.views(flat)
            part_TD = feed_forward(x_TD, views.inner, views.down, SHAPE.activation)
            share_T = (weight_TK * (expert_TK == expert)).sum(-1, keepdim=True)
            y_TD = y_TD + share_T * part_TD
        return x_TD + y_TD


def make(tiered: ExpertSession | None) -> nn.Sequential:
    torch.manual_seed(1)
    routers = [Mixture(layer, tiered) for layer in range(LAYERS)]
    generator = torch.Generator().manual_seed(2)
    for mixture in routers:
        nn.init.normal_(mixture.router.weight, generator=generator)
    return nn.Sequential(*routers)


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[ExpertSession]:
    with open_experts(
        tmp_path / "e", SHAPE, layers=range(LAYERS), experts=EXPERTS, host_budget=TIGHT
    ) as opened:
        yield opened


def batch(seed: int) -> Tensor:
    return torch.randn(10, SHAPE.d_model, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("passes", [1, 2])
def test_it_follows_plain_torch(tiered: ExpertSession, passes: int) -> None:
    """Experts that no token reached have gradients of zero, which AdamW steps with."""
    ours, plain = make(tiered), make(None)
    lr, adamw = 1e-2, tiered.store.core.adamw
    options = {"lr": lr, "betas": adamw.betas, "eps": adamw.eps, "weight_decay": adamw.weight_decay}
    dense = torch.optim.AdamW(ours.parameters(), **options)
    whole = torch.optim.AdamW(plain.parameters(), **options)
    for number in range(8):
        norms = []
        with tiered.step(lr) as step:
            for part in range(passes):
                (ours(batch(10 * number + part)) ** 2).mean().backward()
            norms.append(step.clip(ours.parameters(), 0.5))
        for part in range(passes):
            (plain(batch(10 * number + part)) ** 2).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        for optimizer in (dense, whole):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(ours(batch(99)), plain(batch(99)), rtol=1e-4, atol=1e-5)
    tiered.commit()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            key = expert_key(layer, expert)
            with tiered.store.fetch([key]) as lease:
                found = torch.from_numpy(lease[key].copy("weight"))
            torch.testing.assert_close(found, plain[layer].experts[expert].detach(), rtol=1e-4, atol=1e-5)


def test_it_is_there_again(tmp_path: Path) -> None:
    options = {"layers": range(LAYERS), "experts": EXPERTS, "host_budget": TIGHT}
    with open_experts(tmp_path / "e", SHAPE, **options) as tiered:
        model = make(tiered)
        with tiered.step(1e-2):
            model(batch(0)).sum().backward()
        tiered.commit({"step": b"1"})
        with torch.no_grad():
            expected = model(batch(1))
    with open_experts(tmp_path / "e", SHAPE, **options) as tiered, torch.no_grad():
        assert tiered.store.last_commit.state["step"] == b"1"
        assert torch.equal(make(tiered)(batch(1)), expected)
        for _ in range(LAYERS * EXPERTS):
            make(tiered)(batch(1))
        # Without a step, what is not asked for any more decays by accesses.
        assert tiered.store.core.cache.residency.recorded_clock is StepClock.LATE_ACCESSES
    for shape, experts in ((ExpertShape(8, 16), EXPERTS), (SHAPE, EXPERTS + 1)):
        with (
            pytest.raises(StoreFormatError),
            open_experts(tmp_path / "e", shape, layers=[0], experts=experts, host_budget=TIGHT),
        ):
            pass


def test_steps_that_are_not_taken(tiered: ExpertSession) -> None:
    model = make(tiered)
    with tiered.step(1e-2):
        model(batch(0)).sum().backward()
    tiered.commit()
    before = tiered.store.records_crc32c()
    with tiered.step(1e-2) as step:
        model(batch(0)).sum().backward()
        step.abandon()
    with tiered.step(1e-2) as step:
        (model(batch(0)).sum() * math.nan).backward()
        assert math.isnan(step.clip(model.parameters(), 1.0))
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(NonFiniteError), tiered.step(1e-2):
        (model(batch(0)).sum() * math.nan).backward()
    for missing in (False, True):
        with refuses(StepError, "without a backward pass"), tiered.step(1e-2):
            _ = model(batch(0)) if missing else None
    tiered.commit()
    assert tiered.store.records_crc32c() == before


def test_loops_that_leave_something_out(tiered: ExpertSession) -> None:
    model = make(tiered)
    with refuses(StepError, "layer", "no_grad()"):
        model(batch(0))
    with tiered.step(1e-2) as step:
        with refuses(StepError, "open already"), tiered.step(1e-2):
            pass
        with refuses(StepError, "commit:"):
            tiered.commit()
        found = model(batch(0)).sum()
        with refuses(StepError, "layer", "evaluation"), torch.no_grad():
            model(batch(0))
        found.backward(retain_graph=True)
        with refuses(StepError, "layer", "forward pass"):
            found.backward()
        step.clip(model.parameters(), 1.0)
        with refuses(StepError, "clipped"):
            model(batch(0))
    with refuses(StepError, "layer", "forward pass"):
        found.backward()


def test_a_store_of_other_experts(tmp_path: Path) -> None:
    """Each would open, and train something else without a word: as many parameters, fewer experts, another activation."""
    with open_experts(tmp_path / "e", SHAPE, layers=range(LAYERS), experts=EXPERTS, host_budget=TIGHT):
        pass
    for shape, layers, experts, named in (
        (ExpertShape(SHAPE.d_ff, SHAPE.d_model), LAYERS, EXPERTS, "shape"),
        (ExpertShape(SHAPE.d_model, SHAPE.d_ff, Activation.REGLU), LAYERS, EXPERTS, "shape"),
        (SHAPE, LAYERS - 1, EXPERTS, "layers"),
        (SHAPE, LAYERS, EXPERTS - 1, "experts"),
    ):
        with (
            refuses(StoreFormatError, tmp_path / "e", named),
            open_experts(tmp_path / "e", shape, layers=range(layers), experts=experts, host_budget=TIGHT),
        ):
            pass
    with (
        refuses(BudgetError, "device_budget", "cpu"),
        open_experts(tmp_path / "e", SHAPE, layers=[0], experts=1, device_budget="1MiB"),
    ):
        pass


def test_narrow_moments(tmp_path: Path) -> None:
    """A store of its own format, which another run must ask for again."""
    for moments in (MomentFormat.FP32, MomentFormat.INT8):
        adamw = AdamWConfig(moments=moments)
        options = {"layers": [0], "experts": 2, "adamw": adamw}
        with open_experts(tmp_path / moments.value, SHAPE, **options) as session:
            assert session.store.info(expert_key(0, 0)).schema.moments is moments
    with (
        refuses(StoreFormatError, tmp_path / "int8", "int8", "fp32", "AdamWConfig.moments"),
        open_experts(tmp_path / "int8", SHAPE, layers=[0], experts=2),
    ):
        pass


def test_a_store_whose_making_was_cut_short(tmp_path: Path) -> None:
    options = {"layers": range(LAYERS), "experts": EXPERTS, "host_budget": TIGHT}

    def killed(layer: int, expert: int) -> np.ndarray:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        open_experts(tmp_path / "e", SHAPE, first_weights=killed, **options),
    ):
        pass
    with open_experts(tmp_path / "e", SHAPE, **options) as tiered:
        assert len(tiered.store.core.records) == LAYERS * EXPERTS
