"""Linear layers that read their matrix once: the bits of ``nn.Linear``, and what of it stays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tierstore.serve.dense import FewRowsLinear, quicken_linears


def _linear(
    inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    inputs=st.integers(1, 400),
    outputs=st.integers(1, 400),
    whole=st.booleans(),
)
def test_bits_are_those_of_linear(shape: list[int], inputs: int, outputs: int, whole: bool) -> None:
    if whole:  # as tiles are
        inputs, outputs = inputs * 32, outputs // 16 * 16 or 16
    layer = nn.Sequential(_linear(inputs, outputs))
    x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        assert quicken_linears(layer) == 1
        got = layer(x)
    assert got.shape == expected.shape
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


def test_rows_that_do_not_lie_together() -> None:
    layer = nn.Sequential(_linear(64, 32))
    x = torch.randn(3, 128, 5).bfloat16().transpose(1, 2)[:, :, ::2]
    with torch.no_grad():
        expected = layer(x)
        quicken_linears(layer)
        assert torch.equal(layer(x), expected)


def test_what_is_left_as_it_was() -> None:
    class Other(nn.Linear):
        pass

    other = Other(8, 8, bias=False, dtype=torch.bfloat16)
    model = nn.Sequential(
        _linear(8, 8, bias=True), _linear(8, 8, dtype=torch.float32), other, nn.LayerNorm(8)
    )
    assert quicken_linears(model) == 0
    assert not any(isinstance(layer, FewRowsLinear) for layer in model)


def test_names_parameters_and_hooks_stay() -> None:
    model = nn.ModuleDict({"head": _linear(64, 32)})
    model.register_module("tied", model["head"])
    weight, calls = model["head"].weight, []
    model["head"].register_forward_hook(lambda *_: calls.append(1))
    names = list(model.state_dict())
    assert quicken_linears(model) == 1
    assert list(model.state_dict()) == names
    assert model["tied"].weight is weight
    with torch.no_grad():
        model["head"](torch.zeros(1, 64, dtype=torch.bfloat16))
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_input_of_another_type_is_refused_as_ever(dtype: torch.dtype) -> None:
    layer = nn.Sequential(_linear(64, 32))
    quicken_linears(layer)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        layer(torch.zeros(1, 64, dtype=dtype))
