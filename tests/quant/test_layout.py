"""Where quantised weights lie, and that conversion is the documented arithmetic."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError, DataError
from tierstore.moe.config import Activation, ExpertShape
from tierstore.quant.layout import (
    BLOCK,
    CodeFormat,
    PartKind,
    QuantizedLayout,
    WeightPart,
    dequantize,
    quantize,
)

Floats = npt.NDArray[np.float32]


def matrix(codes: CodeFormat, rows: int, columns: int) -> QuantizedLayout:
    return QuantizedLayout(codes, (WeightPart(PartKind.MATRIX, rows, columns),))


def packed(layout: QuantizedLayout, weights: Floats) -> npt.NDArray[np.uint8]:
    data = np.full(layout.nbytes, 0xAA, np.uint8)
    quantize(layout, weights, data, name="record 'x'")
    return data


def expected_block(codes: CodeFormat, values: Floats) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """(codes, numbers, what they stand for) of one block, as the header of the kernels says."""
    f = np.float32
    if codes is CodeFormat.INT8:
        scale = f(np.abs(values).max() / f(127))
        made = np.rint(values / scale) if scale else np.zeros_like(values)
        return made.astype(np.int64), np.array([scale]), (made.astype(f) * scale).astype(f)
    least = values.min()
    scale = f(f(values.max() - least) / f(15))
    made = np.rint((values - least) / scale) if scale else np.zeros_like(values)
    return made.astype(np.int64), np.array([scale, least]), (made.astype(f) * scale + least).astype(f)


def test_a_block_by_hand() -> None:
    # Largest magnitude 127: a scale of 1. Halves go to the even neighbour.
    weights = np.zeros(BLOCK, np.float32)
    weights[:6] = [127, 0.5, 1.5, -0.5, -2.5, -3.49]
    data = packed(matrix(CodeFormat.INT8, 1, BLOCK), weights)
    assert data[:6].view(np.int8).tolist() == [127, 0, 2, 0, -2, -3]
    assert data[64:68].view(np.float32)[0] == 1.0
    assert data.size == 128  # the scale, and zeros to whole lines
    assert not data[68:].any()
    # From -5 to 10: a scale of 1, codes from 0. Values 0 and 16 share the first byte.
    weights = np.zeros(BLOCK, np.float32)
    weights[[0, 16, 17, 33]] = [-5, 10, 2.5, 1]
    data = packed(matrix(CodeFormat.INT4, 1, BLOCK), weights)
    assert data[0] == 0xF0
    assert data[1] == 5 | 8 << 4  # 0 + 5; 2.5 + 5 to the even neighbour
    assert data[17] == 6 | 5 << 4
    assert data[64:72].view(np.float32).tolist() == [1.0, -5.0]


@pytest.mark.parametrize("codes", CodeFormat)
@given(rows=st.integers(1, 5), columns=st.integers(1, 150), seed=st.integers(0, 2**32 - 1))
def test_conversion_is_the_documented_arithmetic(
    codes: CodeFormat, rows: int, columns: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
    weights[rng.random((rows, columns)) < 0.2] = 0
    layout = matrix(codes, rows, columns)
    data = packed(layout, weights.ravel())
    found = dequantize(layout, data).reshape(rows, columns)
    (span,) = layout.spans
    scales = data[span.scales].view(np.float32).reshape(rows, -1, codes.block_floats)
    for row in range(rows):
        for block, begin in enumerate(range(0, columns, BLOCK)):
            _, numbers, values = expected_block(codes, weights[row, begin : begin + BLOCK])
            np.testing.assert_array_equal(scales[row, block], numbers)
            np.testing.assert_array_equal(found[row, begin : begin + BLOCK], values)


@pytest.mark.parametrize("codes", CodeFormat)
@pytest.mark.parametrize("activation", Activation)
def test_an_expert_keeps_its_order(codes: CodeFormat, activation: Activation) -> None:
    shape = ExpertShape(24, 10, activation)
    layout = shape.quantized(codes)
    assert layout.numel == shape.numel
    weights = np.random.default_rng(1).standard_normal(shape.numel).astype(np.float32)
    found = dequantize(layout, packed(layout, weights))
    assert np.abs(found - weights).max() < (0.02 if codes is CodeFormat.INT8 else 0.3)
    if activation.transposed:
        biases = slice(24 * 20, 24 * 20 + 20)
        np.testing.assert_array_equal(found[biases], weights[biases])
        np.testing.assert_array_equal(found[-24:], weights[-24:])
    spans = layout.spans
    assert all(span.codes.start % 64 == 0 and span.scales.start % 64 == 0 for span in spans)
    assert all(a.scales.stop <= b.codes.start for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("codes", CodeFormat)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 70, -1])
def test_what_is_not_finite_is_refused(codes: CodeFormat, value: float, at: int) -> None:
    layout = ExpertShape(8, 9, Activation.CLAMPED_SWIGLU).quantized(codes)
    weights = np.ones(layout.numel, np.float32)
    weights[at] = value
    with pytest.raises(DataError, match="record 'x': has a weight that is not finite"):
        packed(layout, weights)


def test_extreme_blocks() -> None:
    most = np.finfo(np.float32).max
    for codes in CodeFormat:
        layout = matrix(codes, 1, 3)
        # Too small for a scale: zeros, or the least value.
        tiny = np.array([1e-40, 2e-40, 0], np.float32)
        assert not dequantize(layout, packed(layout, tiny)).any()
        same = np.full(3, 0.3, np.float32)
        np.testing.assert_allclose(dequantize(layout, packed(layout, same)), same, rtol=1e-6)
        # Code 127, or 15, would stand for infinity.
        wide = np.array([most, -most, 0], np.float32)
        with pytest.raises(DataError, match=f"too large to be stored as {codes.value}"):
            packed(layout, wide)
        np.testing.assert_allclose(
            dequantize(layout, packed(layout, wide / 4)), wide / 4, rtol=1e-6, atol=most / 50
        )


def test_sizes_are_checked() -> None:
    layout = matrix(CodeFormat.INT8, 2, 3)
    with pytest.raises(ValueError, match="expected 6 weights"):
        quantize(layout, np.zeros(5, np.float32), np.zeros(layout.nbytes, np.uint8), name="x")
    with pytest.raises(ConfigError, match="expected rows and columns"):
        WeightPart(PartKind.MATRIX, 0, 3)
