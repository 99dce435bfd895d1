"""Narrow moments in numpy, from their description in native/optim/moments.hpp: the hash, the roundings, the codes by
search in a table, the step. Slow and plain; nothing here is the extension's.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

BLOCK = 256
RANDOM_BITS = 20  # of 8-bit codes
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
_MASK = 2**64 - 1
_TINY = np.finfo(np.float32).tiny


def make_steps(count: int, first: int = 1, lr: float = 1e-3, eps: float = 1e-8) -> np.ndarray:
    """Steps first, first + 1, ... of a run whose learning rate and decay change at each of them."""
    rows = [
        (lr * (1 + 0.1 * t), 0.9, 0.999, eps, 0.01 * (t % 3), 1 - 0.9**t, (1 - 0.999**t) ** 0.5)
        for t in range(first, first + count)
    ]
    return np.array(rows, np.float32).reshape(count, 7)


class Signs(Enum):
    """Codes of exp_avg have a sign, those of exp_avg_sq none."""

    SIGNED = "exp_avg"
    UNSIGNED = "exp_avg_sq"


def hash32(record_hash: int, step: int, element: npt.NDArray[np.int64]) -> Words:
    """32 random bits for each element of a record at a step."""
    z = (record_hash + step * 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    z ^= z >> 31
    low, high = z & 0xFFFFFFFF, z >> 32
    h = (element.astype(np.uint64) & 0xFFFFFFFF) ^ np.uint64(low)
    h ^= h >> 16
    h = h * 0x7FEB352D & 0xFFFFFFFF
    h = (h + np.uint64(high)) & 0xFFFFFFFF
    h ^= h >> 15
    h = h * 0x846CA68B & 0xFFFFFFFF
    h ^= h >> 16
    return h.astype(np.uint32)


def flushed(x: Floats) -> Floats:
    """Subnormals as zeros of their sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x).astype(np.float32)


def widen(bf16: npt.NDArray[np.uint16]) -> Floats:
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: Floats, random: npt.NDArray[np.uint32] | int) -> npt.NDArray[np.uint16]:
    """Up in magnitude where the 16 random bits carry; never from finite to infinite."""
    bits = flushed(x).view(np.uint32)
    carries = np.abs(x) < widen(np.array([0x7F7F], np.uint16))  # False of NaN
    return ((bits + np.where(carries, random, 0).astype(np.uint32)) >> 16).astype(np.uint16)


def table(signs: Signs) -> npt.NDArray[np.float64]:
    """The magnitudes of all codes, for a scale of 1: up to 1.875."""
    lowest = -14 if signs is Signs.SIGNED else -29
    code = np.arange(128 if signs is Signs.SIGNED else 248)
    field, mantissa = code >> 3, code & 7
    return np.where(
        field == 0, mantissa * 2.0 ** (lowest - 3), (1 + mantissa / 8) * 2.0 ** (lowest + field - 1.0)
    )


def from_int8(codes: npt.NDArray[np.uint8], scales: Floats, signs: Signs) -> Floats:
    scale = np.repeat(scales, BLOCK)[: codes.size].astype(np.float64)
    if signs is Signs.SIGNED:
        size = table(signs)[codes & 127] * scale
        return np.where(codes & 128, -size, size).astype(np.float32)
    return (table(signs)[codes] * scale).astype(np.float32)


def scale_of(block: Floats) -> float:
    top = float(np.max(np.abs(flushed(block)), initial=0))
    if not np.isfinite(top):
        return float("nan")
    if top == 0:
        return 0.0
    exponent = int(np.floor(np.log2(top)))
    if top > 1.875 * 2.0**exponent:
        exponent += 1
    return 2.0 ** min(max(exponent, -94), 110)


def to_int8(x: Floats, random: npt.NDArray[np.uint32], signs: Signs) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Codes and scales. The code above where the fraction between two codes plus ``random`` / 2**20 reaches 1."""
    codes, scales = np.zeros(x.size, np.uint8), np.zeros(-(-x.size // BLOCK), np.float32)
    magnitudes = table(signs)
    for b in range(scales.size):
        part = slice(b * BLOCK, (b + 1) * BLOCK)
        scale = scale_of(x[part])
        scales[b] = scale
        if not scale > 0:
            continue
        value = flushed(x[part])
        size = np.minimum(np.abs(value).astype(np.float64) / scale, magnitudes[-1])
        size = np.where(size < _TINY, 0, size)
        # The kernel's fp32 sum with the smallest value that has a full mantissa rounds what lies below it.
        lowest = magnitudes[8]
        summed = (size.astype(np.float32) + np.float32(lowest)).astype(np.float64) - lowest
        size = np.where(size < lowest, summed, size)
        below = np.minimum(np.searchsorted(magnitudes, size, side="right") - 1, magnitudes.size - 2)
        gap = magnitudes[below + 1] - magnitudes[below]
        fraction = np.floor((size - magnitudes[below]) / gap * 2**RANDOM_BITS)
        code = below + (fraction + random[part] >= 2**RANDOM_BITS)
        signed = signs is Signs.SIGNED
        codes[part] = code + np.where(np.signbit(value), 128, 0) if signed else np.maximum(code, value != 0)
    return codes, scales


@dataclass
class Stepped:
    """A weight and its moments in fp32, between steps: as they were rounded."""

    weight: Floats
    exp_avg: Floats
    exp_avg_sq: Floats


def step(s: Stepped, row: Floats, grad: Floats | None) -> Stepped:
    """AdamW as native/optim/adamw.hpp writes it, every fp32 operation rounded by itself; the moments not yet rounded."""
    lr, beta1, beta2, eps, decay, correction1, correction2 = (float(x) for x in row)

    def rest(beta: np.float32) -> np.float32:
        return np.float32(1.0 - float(str(beta)))

    shrink = np.float32(1.0 - lr * decay)
    rate, floor = np.float32(lr * correction2 / correction1), np.float32(eps * correction2)
    b1, b2 = np.float32(beta1), np.float32(beta2)
    g = np.zeros_like(s.weight) if grad is None else flushed(grad)
    p, m, v = (flushed(x) for x in (s.weight, s.exp_avg, s.exp_avg_sq))
    f = flushed
    with np.errstate(all="ignore"):
        m = f(f(m * b1) + f(rest(row[1]) * g))
        v = f(f(v * b2) + f(f(rest(row[2]) * g) * g))
        p = f(f(p * shrink) - f(f(rate * m) / f(np.sqrt(v) + floor)))
    return Stepped(p, m, v)
