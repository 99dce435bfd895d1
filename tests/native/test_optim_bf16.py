"""The split master weight: hi rounds half away from zero, lo is what is missing, and merging is exact."""

import numpy as np
import pytest
import torch

from tierstore import _native


def split(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hi, lo = np.empty(bits.size, np.uint16), np.empty(bits.size, np.int16)
    _native.split_bf16(hi, lo, bits.view(np.float32))
    return hi, lo


def merge(hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    merged = np.empty(hi.size, np.float32)
    _native.merge_bf16(merged, hi, lo)
    return merged.view(np.uint32)


@pytest.mark.parametrize(
    ("bits", "hi", "lo"),
    [
        (0x3F800000, 0x3F80, 0),  # 1.0
        (0x3F807FFF, 0x3F80, 0x7FFF),  # just below a tie: down
        (0x3F808000, 0x3F81, -0x8000),  # a tie: away from zero, where half-to-even would go down
        (0xBF808000, 0xBF81, -0x8000),  # and for negative values
        (0x3F80FFFF, 0x3F81, -1),
        (0x7F7FFFFF, 0x7F80, -1),  # the largest finite value: hi is infinity
        (0x00000001, 0x0000, 1),  # the smallest subnormal
        (0x80000000, 0x8000, 0),  # -0
        (0x7F800000, 0x7F80, 0),  # infinity
        (0xFFC00000, 0xFFC0, 0),  # the NaN that processors make
        (0xFFFFFFFF, 0x0000, -1),  # a NaN whose hi carries over all the way; the master survives all the same
    ],
)
def test_by_hand(bits, hi, lo):
    pattern = np.array([bits], np.uint32)
    got_hi, got_lo = split(pattern)
    assert (got_hi[0], got_lo[0]) == (hi, lo)
    assert merge(got_hi, got_lo)[0] == bits


def test_every_low_half_under_many_highs():
    exponents = np.array([0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x4049, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF])
    low = np.arange(2**16, dtype=np.uint32)
    for high in np.concatenate([exponents, exponents | 0x8000]).astype(np.uint32):
        bits = (high << np.uint32(16)) | low
        hi, lo = split(bits)
        np.testing.assert_array_equal(merge(hi, lo), bits)
        np.testing.assert_array_equal(hi, ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16))
        difference = bits.astype(np.int64) - (hi.astype(np.int64) << 16)
        np.testing.assert_array_equal((lo.astype(np.int64) - difference) % 2**32, 0)


def test_only_ties_differ_from_torch():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits = bits[np.isfinite(bits.view(np.float32))]
    hi, _ = split(bits)
    theirs = torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    differs = hi != theirs
    assert np.all(bits[differs] & 0xFFFF == 0x8000)


def test_widen_is_exact():
    patterns = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    widened = np.empty(2**16, np.float32)
    _native.widen_bf16(widened, patterns)
    np.testing.assert_array_equal(widened.view(np.uint32), patterns.astype(np.uint32) << 16)
