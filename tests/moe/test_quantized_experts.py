"""Experts whose weights are codes: every formula against its dequantised self in fp64, and what is refused."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tierstore._native import QuantProducts
from tierstore.errors import ConfigError
from tierstore.moe.config import Activation, ExpertShape
from tierstore.moe.experts import Workspace, forward_expert
from tierstore.moe.layer import MoELayer
from tierstore.moe.router import NoiseKey, RouterConfig
from tierstore.moe.source import ExpertLease
from tierstore.quant.layout import CodeFormat, dequantize, quantize
from tierstore.quant.weights import QuantizedWeights


@pytest.fixture(scope="module")
def products() -> Iterator[QuantProducts]:
    made = QuantProducts(2)
    yield made
    made.close()


def quantized(
    shape: ExpertShape, codes: CodeFormat, products: QuantProducts, seed: int = 0
) -> tuple[QuantizedWeights, Tensor]:
    """An expert of small random weights, and the flat fp32 weights that its codes stand for."""
    layout = shape.quantized(codes)
    weights = np.random.default_rng(seed).standard_normal(shape.numel).astype(np.float32) * np.float32(0.1)
    data = np.empty(layout.nbytes, np.uint8)
    quantize(layout, weights, data, name="x")
    return QuantizedWeights(layout, torch.from_numpy(data), products), torch.from_numpy(
        dequantize(layout, data)
    )


def forward(shape: ExpertShape, weights: QuantizedWeights | Tensor, x_MD: Tensor) -> Tensor:
    rows = x_MD.shape[0]
    work = Workspace(shape, rows, x_MD)
    out_MD = torch.empty_like(x_MD)
    forward_expert(shape, weights, x_MD, work.inner(0, rows), out_MD, work)
    return out_MD


@pytest.mark.parametrize("codes", CodeFormat)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formulas_against_fp64(
    products: QuantProducts, codes: CodeFormat, activation: Activation, dtype: torch.dtype
) -> None:
    shape = ExpertShape(48, 100, activation, limit=0.7)
    weights, flat = quantized(shape, codes, products)
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, exact = forward(shape, weights, x), forward(shape, flat.double(), x.double())
    # bf16 rounds what feeds the activation, what comes of it, and the result.
    room = 2e-6 if dtype is torch.float32 else 0.02
    assert torch.allclose(found.double(), exact, rtol=room, atol=room)
    alone = torch.cat([forward(shape, weights, row) for row in x.split(1)])
    products_alone = (
        torch.empty(7, shape.inner_rows, dtype=dtype),
        torch.empty(1, shape.inner_rows, dtype=dtype),
    )
    weights.multiply(0, x, products_alone[0])
    weights.multiply(0, x[3:4], products_alone[1])
    assert torch.equal(products_alone[0][3:4], products_alone[1])
    assert torch.allclose(alone, found, rtol=room, atol=room)


class _Source:
    """Leases of quantised experts, in both directions."""

    def __init__(self, experts: Sequence[QuantizedWeights]) -> None:
        self._experts = experts

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        for expert in experts:
            yield ExpertLease(expert, self._experts[expert])

    backward = forward


class _Flat(_Source):
    """The same in fp32."""

    def __init__(self, experts: Sequence[Tensor]) -> None:
        self._flat = experts

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        for expert in experts:
            yield ExpertLease(expert, self._flat[expert])


@pytest.mark.parametrize("codes", CodeFormat)
def test_a_layer_computes_forward_and_refuses_backward(products: QuantProducts, codes: CodeFormat) -> None:
    shape = ExpertShape(16, 24)
    made = [quantized(shape, codes, products, seed) for seed in range(4)]
    torch.manual_seed(0)
    layer = MoELayer(RouterConfig(experts=4), shape, _Source([weights for weights, _ in made]), layer=0)
    torch.manual_seed(0)
    plain = MoELayer(RouterConfig(experts=4), shape, _Flat([flat for _, flat in made]), layer=0)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(9, 16, requires_grad=True)
    with torch.no_grad():
        assert torch.allclose(layer.eval()(x, NoiseKey())[0], plain.eval()(x, NoiseKey())[0], atol=1e-5)
    y = layer(x, NoiseKey())[0]
    with pytest.raises(ConfigError, match=f"experts in {codes.value} support only forward passes"):
        y.sum().backward()
