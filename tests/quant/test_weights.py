"""Products with quantised weights: against fp64, and the same bits however they are computed."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native
from tierstore._native import InstructionSet, QuantProducts
from tierstore.errors import ConfigError
from tierstore.quant.layout import CodeFormat, PartKind, QuantizedLayout, WeightPart, dequantize, quantize
from tierstore.quant.weights import QuantizedWeights, plain_weights

DTYPES = (torch.float32, torch.bfloat16)
SETS = [
    isa
    for isa in (InstructionSet.SCALAR, InstructionSet.AVX2, InstructionSet.AVX512)
    if _native.instruction_set_supported(isa)
]


@pytest.fixture(scope="module")
def products() -> Iterator[QuantProducts]:
    made = QuantProducts(2)
    yield made
    made.close()


def made_weights(
    codes: CodeFormat, rows: int, columns: int, seed: int, products: QuantProducts
) -> tuple[QuantizedWeights, torch.Tensor]:
    """A quantised matrix, and what it stands for."""
    layout = QuantizedLayout(codes, (WeightPart(PartKind.MATRIX, rows, columns),))
    weights = np.random.default_rng(seed).standard_normal(layout.numel).astype(np.float32)
    data = np.empty(layout.nbytes, np.uint8)
    quantize(layout, weights, data, name="x")
    made = QuantizedWeights(layout, torch.from_numpy(data), products)
    return made, torch.from_numpy(dequantize(layout, data)).view(rows, columns)


def bits(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_product_by_hand(products: QuantProducts) -> None:
    layout = QuantizedLayout(CodeFormat.INT8, (WeightPart(PartKind.MATRIX, 2, 3),))
    data = np.empty(layout.nbytes, np.uint8)
    quantize(layout, np.array([127, 2, -3, 0, 63.5, 0], np.float32), data, name="x")
    weights = QuantizedWeights(layout, torch.from_numpy(data), products)
    out = torch.empty(1, 2)
    weights.multiply(0, torch.tensor([[1.0, 10.0, 100.0]]), out)
    assert out.tolist() == [[127 + 20 - 300, 635]]


@pytest.mark.parametrize("codes", CodeFormat)
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 1200),
    m=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_against_fp64(
    products: QuantProducts, codes: CodeFormat, dtype: torch.dtype, rows: int, columns: int, m: int, seed: int
) -> None:
    weights, matrix = made_weights(codes, rows, columns, seed, products)
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out = torch.empty(m, rows, dtype=dtype)
    weights.multiply(0, x, out)
    exact = x.double() @ matrix.double().t()
    # Sixteen lanes: columns / 16 + 4 additions and a product, each within half of 2^-23 of the magnitudes' sum.
    room = (columns / 16 + 6) * 2.0**-23 * (x.double().abs() @ matrix.double().abs().t())
    if dtype is torch.bfloat16:
        room = room + exact.abs() * 2.0**-8
    assert bool(((out.double() - exact).abs() <= room + 1e-30).all())


@pytest.mark.parametrize("codes", CodeFormat)
@given(
    rows=st.integers(1, 200),
    columns=st.integers(1, 1100),
    m=st.integers(1, 140),
    seed=st.integers(0, 2**32 - 1),
)
def test_bits_depend_on_a_row_and_the_matrix_alone(
    products: QuantProducts, codes: CodeFormat, rows: int, columns: int, m: int, seed: int
) -> None:
    weights, _ = made_weights(codes, rows, columns, seed, products)
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(seed))
    out = torch.empty(m, rows)
    weights.multiply(0, x, out)
    (span,) = weights.layout.spans
    data = weights.data.numpy()
    parts = data[span.codes], data[span.scales].view(np.float32)
    for isa in SETS:
        again = np.full((m, rows), np.nan, np.float32)
        products.multiply(codes.native, again, x.numpy(), *parts, isa)
        assert again.tobytes() == bits(out)
    row = seed % m
    alone = torch.empty(1, rows)
    weights.multiply(0, x[row : row + 1], alone)
    assert bits(alone) == bits(out[row : row + 1])
    narrow = torch.empty(m, rows, dtype=torch.bfloat16)
    weights.multiply(0, x.bfloat16(), narrow)
    wide = torch.empty(m, rows)
    weights.multiply(0, x.bfloat16().float(), wide)
    assert bits(wide.bfloat16()) == bits(narrow)


@pytest.mark.parametrize("codes", CodeFormat)
@pytest.mark.parametrize("m", [1, 5])
def test_threads_do_not_show(products: QuantProducts, codes: CodeFormat, m: int) -> None:
    # Enough codes to wake threads: the parts are computed by whoever comes first.
    weights, _ = made_weights(codes, 3000, 256, 5, products)
    x, outs = torch.randn(m, 256), []
    for threads in (1, 2, 5):
        other = QuantProducts(threads)
        for _ in range(3):
            out = torch.empty(m, 3000)
            QuantizedWeights(weights.layout, weights.data, other).multiply(0, x, out)
            outs.append(bits(out))
        other.close()
    assert len(set(outs)) == 1


@pytest.mark.parametrize("codes", CodeFormat)
def test_what_is_not_finite_comes_through(products: QuantProducts, codes: CodeFormat) -> None:
    weights, _ = made_weights(codes, 40, 100, 3, products)
    x = torch.randn(3, 100).bfloat16()
    x[1, 7] = torch.nan
    out = torch.empty(3, 40, dtype=torch.bfloat16)
    weights.multiply(0, x, out)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("codes", CodeFormat)
def test_torch_dequantises_the_same(products: QuantProducts, codes: CodeFormat) -> None:
    weights, matrix = made_weights(codes, 33, 100, 3, products)
    assert torch.equal(weights.matrix(0, torch.float32), matrix)
    assert torch.equal(weights.matrix(0, torch.bfloat16), matrix.bfloat16())


def test_misuse_is_refused(products: QuantProducts) -> None:
    weights, _ = made_weights(CodeFormat.INT4, 4, 8, 3, products)
    with pytest.raises(ConfigError, match="experts in int4 support only forward passes"):
        plain_weights(weights)
    with pytest.raises(ValueError, match="expected fp32 or bf16"):
        weights.multiply(0, torch.zeros(1, 8).double(), torch.zeros(1, 4).double())
    with pytest.raises(ValueError, match="bytes, got"):
        QuantizedWeights(weights.layout, weights.data[:-1], products)
    with pytest.raises(ValueError, match="products: required on the CPU"):
        QuantizedWeights(weights.layout, weights.data)
    with pytest.raises(ValueError, match="as many rows"):
        weights.multiply(0, torch.zeros(2, 8), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="codes, scales: expected"):
        weights.multiply(0, torch.zeros(1, 80), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="threads: expected at least 1"):
        QuantProducts(0)
