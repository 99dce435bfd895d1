"""Gradient accumulation, sums of squares and the check for infinities and NaNs."""

import math

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _native
from tierstore._native import InstructionSet

SETS = [s for s in InstructionSet if _native.instruction_set_supported(s)]
quick = settings(max_examples=share(50))
sizes = st.integers(0, 200)
offsets = st.integers(0, 17)
seeds = st.integers(0, 2**32 - 1)


def finite(size: int, seed: int) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(bits) & (np.abs(bits) < 1e38), bits, np.float32(1.5))


@quick
@given(sizes, offsets, seeds)
def test_accumulate_equals_numpy(size, offset, seed):
    memory, src = finite(size + offset, seed), finite(size, seed + 1)
    dst = memory[offset:]
    expected = dst + src
    _native.accumulate(dst, src)
    np.testing.assert_array_equal(dst.view(np.uint32), expected.view(np.uint32))


@quick
@given(sizes, offsets, seeds)
def test_accumulate_bf16_equals_numpy(size, offset, seed):
    memory = finite(size + offset, seed)
    src = (finite(size, seed + 1).view(np.uint32) >> 16).astype(np.uint16)
    dst = memory[offset:]
    expected = dst + (src.astype(np.uint32) << 16).view(np.float32)
    _native.accumulate_bf16(dst, src)
    np.testing.assert_array_equal(dst.view(np.uint32), expected.view(np.uint32))


def test_sum_of_squares_by_hand():
    assert _native.sum_of_squares(np.arange(1, 18, dtype=np.float32)) == 17 * 18 * 35 / 6
    assert _native.sum_of_squares(np.zeros(0, np.float32)) == 0


def in_lanes(src: np.ndarray) -> float:
    """The documented order: 16 lanes, then pairs 8, 4, 2, 1 apart."""
    lanes = np.zeros(16)
    for i in range(0, src.size, 16):
        part = src[i : i + 16].astype(np.float64)
        lanes[: part.size] += part * part
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return float(lanes[0])


@quick
@given(sizes, offsets, seeds)
def test_sum_of_squares_has_the_same_bits_everywhere(size, offset, seed):
    src = finite(size + offset, seed)[offset:]
    exact = math.fsum(float(x) ** 2 for x in src)
    for isa in SETS:
        total = _native.sum_of_squares(src, isa)
        assert total == in_lanes(src)
        assert math.isclose(total, exact, rel_tol=1e-14)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("size", [1, 15, 16, 4096, 4097, 9000])
def test_one_bad_value_is_found_wherever_it_is(value, size):
    src = np.full(size, 3e38, np.float32)
    assert _native.all_finite(src)
    for at in {0, size // 2, size - 1}:
        src[at] = value
        assert not _native.all_finite(src)
        src[at] = 1e-45
    assert _native.all_finite(src)
