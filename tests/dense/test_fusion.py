"""Gathered units: parameters are views of a pool that never grows, and NaN outside of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_cases import LR, Setting, backward, make_model, piece, since, slice_model, whole_weights
from torch.nn import functional as F

from tierstore.dense import DenseSlices
from tierstore.dense.fusion import FusionBuffer, saved_by_place
from tierstore.errors import BudgetError
from tierstore.model import Transformer
from tierstore.parallel import RankGroup

HOST = {"optimizer_state": "host"}


def made(changes: dict[str, Any], **model: Any) -> tuple[Transformer, DenseSlices]:
    built = make_model(model)
    return built, slice_model(built, RankGroup.alone(), changes)


def test_a_gathered_parameter_is_a_view_and_a_released_one_is_nan() -> None:
    plain = make_model({})
    model, dense = made({**HOST, "buffers": 1})
    name = "blocks.1.attention.qkv"
    found, wanted = dict(model.named_parameters())[name], dict(plain.named_parameters())[name]
    assert found.shape == wanted.shape
    assert found.isnan().all()
    assert found.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match=r"block\.1 is used before it is gathered"):
        dense.use(2)
    dense.gather(2)
    dense.gather(2)
    dense.use(2)
    assert torch.equal(found, wanted)
    addresses = {p.untyped_storage().data_ptr() for p in model.blocks[1].parameters()}
    assert len(addresses) == 1
    with pytest.raises(BudgetError, match=r"dense\.buffers: block\.0 .* all 1 .* \(block\.1\); at least 2"):
        dense.gather(1)
    with pytest.raises(RuntimeError, match=r"block\.1 is stepped while it is gathered"):
        dense.step_unit(2, LR)
    dense.release(2)
    assert found.isnan().all()
    dense.gather(1)
    dense.use(1)
    first = dict(model.named_parameters())["blocks.0.attention.qkv"]
    assert first.untyped_storage().data_ptr() in addresses


def test_the_ends_stay_until_they_are_stepped() -> None:
    model, dense = made(HOST)
    before = replace(dense.traffic)
    dense.gather(0)
    dense.use(0)
    dense.release(0)
    held = model.embedding.detach().clone()
    assert not held.isnan().any()
    dense.step_unit(0, LR)
    assert model.embedding.isnan().all()
    dense.gather(0)
    dense.use(0)
    torch.testing.assert_close(model.embedding.detach(), held * (1 - LR * 0.1))
    assert since(dense.traffic, before).gathers == 0  # one rank sends no messages


def test_one_rank_has_no_copy() -> None:
    model, dense = made({})
    for unit, (_, parameters) in enumerate(model.dense_units()):
        for parameter in parameters:
            address = dense.slices[unit].weight.untyped_storage().data_ptr()
            assert parameter.untyped_storage().data_ptr() == address
    assert dense.nbytes.fusion == dense.nbytes.gradients == 0


def test_evaluation_needs_one_buffer() -> None:
    plain = make_model({})
    model, _ = made({**HOST, "buffers": 1})
    tokens, targets = piece(model.config, 0, 0)
    with torch.no_grad():
        assert model(tokens, targets).loss == plain(tokens, targets).loss
        assert model.generate([1, 2], 3, temperature=0) == plain.generate([1, 2], 3, temperature=0)


# What autograd saves ----------------------------------------------------------------------------------------


class _Pool:
    """Two buffers of 64 floats, by hand: unit 7 is in the first, later in the second."""

    def __init__(self) -> None:
        self.buffers = [FusionBuffer(256, torch.device("cpu"), scratch=0) for _ in range(2)]
        self.buffers[0].unit = 7

    def find(self, address: int) -> FusionBuffer | None:
        return next((b for b in self.buffers if b.address == address), None)


def _through_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def _through_transpose(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


def _through_slice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w[1:, ::2].sum(dim=0).repeat_interleave(2)) * w[2]


def _through_chunks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first, second = w.chunk(2)
    return F.silu(x @ first.t()) * F.linear(x, second)


@pytest.mark.parametrize("through", [_through_linear, _through_transpose, _through_slice, _through_chunks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_views_follow_their_unit(through: Any, dtype: torch.dtype) -> None:
    pool: Any = _Pool()
    weight = torch.randn(6, 4).to(dtype)
    x = torch.randn(3, 4).to(dtype)

    plain_x, plain_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    through(plain_x, plain_w).square().sum().backward()

    parameter = torch.nn.Parameter(torch.empty(6, 4, dtype=dtype))
    span = slice(8, 32)
    first, second = (buffer.memory.view(dtype)[span] for buffer in pool.buffers)
    first.copy_(weight.flatten())
    parameter.data = first.view(6, 4)
    own_x = x.clone().requires_grad_()
    asked: list[int] = []

    def present(unit: int) -> FusionBuffer:
        asked.append(unit)
        return pool.buffers[1]

    with saved_by_place(pool, present):
        y = through(own_x, parameter).square().sum()
    pool.buffers[0].memory.view(dtype).fill_(float("nan"))
    second.copy_(weight.flatten())
    parameter.data = second.view(6, 4)
    y.backward()
    assert set(asked) == {7}
    assert torch.equal(own_x.grad, plain_x.grad)  # type: ignore[arg-type]
    assert torch.equal(parameter.grad, plain_w.grad)  # type: ignore[arg-type]


def test_backward_passes_find_their_units_in_other_buffers() -> None:
    """Between the passes the buffer that every forward pass used is taken, and spoilt."""
    gradients = []
    for buffers in (1, 2):
        model, dense = made({**HOST, "buffers": buffers})
        dense.begin_micro()
        output = model(*piece(model.config, 0, 0))
        for buffer in dense._pool._shared:
            buffer.memory.fill_(255)  # NaN
        if buffers == 2:
            dense.gather(1)
        output.objective.backward()
        dense.end_micro()
        dense.finish()
        gradients.append([unit.gradient.clone() for unit in dense.slices])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
        assert torch.isfinite(one).all()


def test_non_finite_gradients_are_seen() -> None:
    model, dense = made(HOST)
    backward(model, dense, RankGroup.alone(), Setting(pieces=1), 0)
    assert sum(dense.squares()) < float("inf")
    dense.slices[2].gradient[3] = float("inf")
    assert sum(dense.squares()) == float("inf")
    dense.slices[0].gradient[0] = float("nan")
    assert sum(dense.squares()) != sum(dense.squares())
    dense.zero_grad()
    assert sum(dense.squares()) == 0.0
    assert whole_weights(model, dense).keys() == dict(model.named_parameters()).keys()
