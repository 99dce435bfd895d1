"""AdamW with moments in bf16 and in 8 bits: by hand, against numpy, unbiased, the same bits however it is split."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import naive_moments as naive
import numpy as np
import numpy.typing as npt
import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_moments import Signs, make_steps

from tierstore import _native
from tierstore._native import InstructionSet, Moment, MomentFormat

SETS = [s for s in InstructionSet if _native.instruction_set_supported(s)]
NARROW = [MomentFormat.BF16, MomentFormat.INT8]
BLOCK = _native.MOMENT_BLOCK
RECORD = 0xFEDCBA9876543210
quick = settings(max_examples=share(30))
seeds = st.integers(0, 2**32 - 1)


def empty(size: int, form: MomentFormat) -> Any:
    if form is MomentFormat.BF16:
        return np.zeros(size, np.uint16)
    return np.zeros(size, np.uint8), np.zeros(-(-size // BLOCK), np.float32)


def encoded(values: npt.NDArray[np.float32], form: MomentFormat, moment: Moment) -> Any:
    out = empty(values.size, form)
    _native.encode_moment(moment, out, values)
    return out


def decoded(narrow: Any, moment: Moment) -> npt.NDArray[np.float32]:
    out = np.empty(narrow[0].size if isinstance(narrow, tuple) else narrow.size, np.float32)
    _native.decode_moment(moment, out, narrow)
    return out


def part_of(narrow: Any, part: slice) -> Any:
    if isinstance(narrow, tuple):
        return narrow[0][part], narrow[1][part.start // BLOCK : -(-part.stop // BLOCK)]
    return narrow[part]


@dataclass
class State:
    """A record with its moments in a narrow format, and its step."""

    weight: npt.NDArray[np.float32]
    exp_avg: Any
    exp_avg_sq: Any
    first: int = 0
    last: int = 0

    @classmethod
    def made(cls, size: int, form: MomentFormat, seed: int, first: int = 0) -> State:
        """Moments over many powers of ten, zeros among them."""
        rng = np.random.default_rng(seed)
        size_of = np.exp(rng.standard_normal(size) * 3).astype(np.float32) * rng.choice(
            np.float32([0, 1, 1, 1e-20]), size
        )
        m = (rng.standard_normal(size) * size_of).astype(np.float32)
        v = (rng.random(size) * size_of**2).astype(np.float32)
        weight = rng.standard_normal(size).astype(np.float32)
        return cls(
            weight, encoded(m, form, Moment.EXP_AVG), encoded(v, form, Moment.EXP_AVG_SQ), first, 1 << 33
        )

    def copy(self) -> State:
        def again(x: Any) -> Any:
            return tuple(a.copy() for a in x) if isinstance(x, tuple) else x.copy()

        return State(self.weight.copy(), again(self.exp_avg), again(self.exp_avg_sq), self.first, self.last)

    def run(self, rows: Any, grad: Any, isa: InstructionSet | None = None, part: slice | None = None) -> None:
        """Steps ``part``; the step's number advances with the whole."""
        p = part or slice(0, self.weight.size)
        last = self.last + len(rows)
        _native.adamw(
            self.weight[p],
            part_of(self.exp_avg, p),
            part_of(self.exp_avg_sq, p),
            None if grad is None else grad[p],
            rows,
            0.5,
            isa,
            record_hash=RECORD,
            last_step=last,
            first=self.first + p.start,
        )
        if part is None:
            self.last = last

    def bits(self) -> bytes:
        moments = []
        for x in (self.exp_avg, self.exp_avg_sq):
            moments += list(x) if isinstance(x, tuple) else [x]
        return b"".join(a.tobytes() for a in (self.weight, *moments))


@quick
@given(st.sampled_from(NARROW), st.integers(1, 9000), seeds, st.sampled_from(SETS))
def test_a_gradient_in_bf16_is_the_same_in_fp32(
    form: MomentFormat, size: int, seed: int, isa: InstructionSet
) -> None:
    wide = State.made(size, form, seed, first=3 * BLOCK)
    narrow = wide.copy()
    halves = (gradient(size, seed).view(np.uint32) >> 16).astype(np.uint16)
    wide.run(make_steps(2), (halves.astype(np.uint32) << 16).view(np.float32), isa)
    narrow.run(make_steps(2), halves, isa)
    assert narrow.bits() == wide.bits()


def gradient(size: int, seed: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * np.exp(rng.standard_normal(size) * 3)).astype(np.float32)


def test_a_hash_by_hand():
    # key = splitmix64's finaliser of 1 + 2 * 0x9e3779b97f4a7c15; the rest in the steps of moments.hpp.
    z = (1 + 2 * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    h = 3 ^ (z % 2**32)
    h ^= h >> 16
    h = (h * 0x7FEB352D + (z >> 32)) % 2**32
    h ^= h >> 15
    h = h * 0x846CA68B % 2**32
    h ^= h >> 16
    assert naive.hash32(1, 2, np.array([3]))[0] == h
    # A step that only rounds: exp_avg = 1 + 0.3 * 2^-7 lies 0.3 of the way to the next bf16, and so does exp_avg_sq.
    value = np.float32(1 + 0.3 * 2**-7)
    m, v = (np.zeros(4, np.uint16) for _ in range(2))
    grad = np.full(4, value, np.float32)
    keep = np.array([[0, 0, 0, 1, 0, 1, 1]], np.float32)  # both betas 0: m = g, v = g * g
    _native.adamw(np.ones(4, np.float32), m, v, grad, keep, record_hash=1, last_step=2)
    carry = (value.view(np.uint32) & 0xFFFF) + (h & 0xFFFF) > 0xFFFF
    assert m[3] == 0x3F80 + carry


def test_codes_by_hand():
    # The largest is 1.5: the scale is 1. 1.5 = 1 + 4/8, field 15: 15 * 8 + 4; 0.25 is field 13; 3 * 2^-17 is linear.
    m = np.array([1.5, -0.25, 3 * 2.0**-17, 0, -0.0, 2.0**-20], np.float32)
    codes, scales = encoded(m, MomentFormat.INT8, Moment.EXP_AVG)
    assert codes.tolist() == [124, 128 + 104, 3, 0, 128, 0]
    assert scales.tolist() == [1]
    # Unsigned: 1.5 is field 30; 2^-29 the lowest full mantissa; what is smaller than any code keeps 1.
    v = np.array([1.5, 2.0**-29, 2.0**-60, 0, 1.875], np.float32)
    codes, scales = encoded(v, MomentFormat.INT8, Moment.EXP_AVG_SQ)
    assert codes.tolist() == [244, 8, 1, 0, 247]
    assert scales.tolist() == [1]
    # Above 1.875 the scale doubles; ties go away from zero.
    codes, scales = encoded(np.array([1.95, 1.0625], np.float32), MomentFormat.INT8, Moment.EXP_AVG)
    assert (codes.tolist(), scales.tolist()) == ([120, 113], [2])


def oracle_step(s: State, row: Any, grad: Any, number: int) -> State:
    """One step by numpy, from the state's own bits."""
    int8 = isinstance(s.exp_avg, tuple)
    m = naive.from_int8(*s.exp_avg, Signs.SIGNED) if int8 else naive.widen(s.exp_avg)
    v = naive.from_int8(*s.exp_avg_sq, Signs.UNSIGNED) if int8 else naive.widen(s.exp_avg_sq)
    half = None if grad is None else grad * np.float32(0.5)
    after = naive.step(naive.Stepped(s.weight, m, v), row, half)
    h = naive.hash32(RECORD, number, np.arange(s.weight.size) + s.first)
    if int8:
        moments = (
            naive.to_int8(after.exp_avg, h >> 12, Signs.SIGNED),
            naive.to_int8(after.exp_avg_sq, h & 0xFFFFF, Signs.UNSIGNED),
        )
    else:
        moments = naive.to_bf16(after.exp_avg, h & 0xFFFF), naive.to_bf16(after.exp_avg_sq, h >> 16)
    return State(after.weight, *moments, s.first, number)


@pytest.mark.parametrize("form", NARROW)
@quick
@given(st.integers(1, 700), seeds, st.booleans())
def test_steps_are_those_of_numpy(form, size, seed, grad):
    got = State.made(size, form, seed, first=BLOCK * (seed % 1000))
    want = got.copy()
    for t in range(3):
        g = gradient(size, seed + t) if grad else None
        row = make_steps(1, 1 + t)
        want = oracle_step(want, row[0], g, want.last + 1)
        got.run(row, g)
        assert got.bits() == want.bits()


@pytest.mark.parametrize("form", NARROW)
@quick
@given(st.integers(0, 700), seeds, st.integers(1, 4), st.booleans())
def test_every_instruction_set_gives_the_same_bits(form, size, seed, count, grad):
    start = State.made(size, form, seed, first=BLOCK * (2**32 // BLOCK - 1))  # wraps within
    results = set()
    for isa in SETS:
        s = start.copy()
        s.run(make_steps(count), gradient(size, seed) if grad else None, isa)
        results.add(s.bits())
    assert len(results) == 1


@pytest.mark.parametrize("form", NARROW)
@quick
@given(st.integers(1, 700), seeds, st.integers(1, 8), st.booleans(), st.sampled_from(SETS))
def test_missed_steps_in_one_pass_equal_separate_steps(form, size, seed, count, grad, isa):
    together = State.made(size, form, seed)
    apart = together.copy()
    rows, g = make_steps(count), gradient(size, seed) if grad else None
    together.run(rows, g, isa)
    for row in rows[:-1]:
        apart.run(row[None], None, isa)
    apart.run(rows[-1:], g, isa)
    assert together.bits() == apart.bits()


@pytest.mark.parametrize("form", NARROW)
@quick
@given(st.integers(1, 1500), seeds, st.lists(st.integers(0, 1500), max_size=4), st.sampled_from(SETS))
def test_any_split_gives_the_same_bits(form, size, seed, cuts, isa):
    whole = State.made(size, form, seed)
    split = whole.copy()
    rows, g = make_steps(3), gradient(size, seed)
    whole.run(rows, g, isa)
    unit = BLOCK if form is MomentFormat.INT8 else 1
    bounds = sorted({0, size, *(min(c // unit * unit, size) for c in cuts)})
    for a, b in pairwise(bounds):
        split.run(rows, g, isa, slice(a, b))
    assert split.bits() == whole.bits()


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("isa", SETS)
def test_a_split_weight_takes_the_same_steps(form, isa):
    size = 1111
    whole = State.made(size, form, 5)
    other = whole.copy()
    hi, lo = np.empty(size, np.uint16), np.empty(size, np.int16)
    _native.split_bf16(hi, lo, whole.weight)
    for grad in (gradient(size, 1), None):
        rows = make_steps(2)
        whole.run(rows, grad, isa)
        other.last += 2
        _native.adamw(
            (hi, lo),
            other.exp_avg,
            other.exp_avg_sq,
            grad,
            rows,
            0.5,
            isa,
            record_hash=RECORD,
            last_step=other.last,
        )
    _native.merge_bf16(other.weight, hi, lo)
    assert other.bits() == whole.bits()


def test_bf16_rounding_is_unbiased_exactly():
    random = np.arange(2**16, dtype=np.uint32)
    for x in (1.0, 1.2345678, -3.0000002, 1.9999999, 1e-37, 3.3e38, 1.1754944e-38, 6.1e-5):
        value = np.float32(x)
        rounded = naive.widen(naive.to_bf16(np.full(random.size, value), random)).astype(np.float64)
        assert rounded.mean() == float(value)
    for x in (
        3.3961775e38,
        -3.4e38,
    ):  # from the largest bf16 on: towards zero, for there is no finite one above
        assert set(naive.to_bf16(np.full(random.size, x, np.float32), random) & 0x7FFF) == {0x7F7F}


@pytest.mark.parametrize("signs", list(Signs))
def test_8_bit_rounding_is_unbiased_exactly(signs):
    random = np.arange(0, 2**20, dtype=np.uint32)
    top, count = np.float32(1.5), BLOCK - 1
    values = np.float32([1.2345678, 1.0000001, 0.7654321, 0.01, 3e-4, 7.7e-5])
    for value in values:
        # The value's block has `top` as its largest; every random number once, 255 at a time.
        blocks = -(-random.size // count)
        padded = np.zeros(blocks * count, np.uint32)
        padded[: random.size] = random
        block_random = np.zeros((blocks, BLOCK), np.uint32)
        block_random[:, 1:] = padded.reshape(blocks, count)
        x = np.full((blocks, BLOCK), value, np.float32)
        x[:, 0] = top
        codes, scales = naive.to_int8(x.ravel(), block_random.ravel(), signs)
        back = naive.from_int8(codes, scales, signs).astype(np.float64).reshape(blocks, BLOCK)
        assert back[:, 1:].ravel()[: random.size].mean() == float(value)


@pytest.mark.parametrize("form", NARROW)
def test_the_kernels_rounding_is_unbiased(form):
    # 2^20 elements of one value, rounded once: the mean is within five of its own standard deviations.
    size = 1 << 20
    keep = np.array([[0, 0, 0, 1, 0, 1, 1]], np.float32)
    m, v = empty(size, form), empty(size, form)
    grad = np.full(size, np.sqrt(np.float32(0.3)), np.float32)
    grad[::BLOCK] = 1
    _native.adamw(np.ones(size, np.float32), m, v, grad, keep, record_hash=7, last_step=9)
    inner = np.arange(size) % BLOCK != 0
    pair = []
    for narrow, moment, value in ((m, Moment.EXP_AVG, grad[1]), (v, Moment.EXP_AVG_SQ, grad[1] * grad[1])):
        got = decoded(narrow, moment)[inner].astype(np.float64)
        below, above = got.min(), got.max()
        assert below < value < above
        assert np.unique(got).size == 2
        p = (float(value) - below) / (above - below)
        assert abs((got == above).mean() - p) < 5 * (p * (1 - p) / got.size) ** 0.5
        pair.append((got == above) - p)
    # Neither the two moments nor neighbours nor what lies a block apart round together.
    for a, b in (
        (pair[0], pair[1]),
        *((x[lag:], x[:-lag]) for x in pair for lag in (1, 2, 8, 16, BLOCK - 1)),
    ):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / a.size**0.5


def test_the_hash_has_avalanche():
    # Each bit of the element, the step and the record turns each bit of the hash half of the time.
    elements = np.random.default_rng(0).integers(0, 2**32, 4096)
    plain = naive.hash32(RECORD, 1000, elements)
    changed = [naive.hash32(RECORD, 1000, elements ^ (1 << b)) for b in range(32)]
    changed += [naive.hash32(RECORD, 1000 ^ (1 << b), elements) for b in range(40)]
    changed += [naive.hash32(RECORD ^ (1 << b), 1000, elements) for b in range(64)]
    for other in changed[:32]:
        turned = ((plain ^ other)[:, None] >> np.arange(32) & 1).mean(0)
        assert np.all(np.abs(turned - 0.5) < 0.12)
    for other in changed[32:]:
        assert abs(float(((plain ^ other)[:, None] >> np.arange(32) & 1).mean()) - 0.5) < 0.02


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("isa", SETS)
def test_an_exp_avg_sq_that_is_not_zero_never_rounds_to_zero(form, isa):
    size = 3 * BLOCK + 17
    v = np.float32(10.0) ** np.linspace(-37, 30, size, dtype=np.float32)
    s = State.made(size, form, 1)
    s.exp_avg_sq = encoded(v, form, Moment.EXP_AVG_SQ)
    assert np.all(decoded(s.exp_avg_sq, Moment.EXP_AVG_SQ) > 0)
    still = np.array([[0, 0.9, 1, 1e-8, 0, 1, 1]], np.float32)  # beta2 = 1: exp_avg_sq stays as it is
    for _ in range(20):
        s.run(still, None, isa)
        assert np.all(decoded(s.exp_avg_sq, Moment.EXP_AVG_SQ) > 0)


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("isa", SETS)
def test_what_is_not_finite_stays_so(form, isa):
    size = 4 * BLOCK
    grad = np.ones(size, np.float32)
    grad[[3, 2 * BLOCK, 2 * BLOCK + 1]] = [np.nan, np.inf, -np.inf]
    nan = grad.view(np.uint32)
    nan[7] = 0xFFFFFFFF  # a payload that a carry would turn into a zero
    s = State(np.ones(size, np.float32), empty(size, form), empty(size, form))
    s.run(make_steps(1), grad, isa)
    for narrow, moment in ((s.exp_avg, Moment.EXP_AVG), (s.exp_avg_sq, Moment.EXP_AVG_SQ)):
        finite = np.isfinite(decoded(narrow, moment))
        bad = {3, 7, 2 * BLOCK, 2 * BLOCK + 1}
        if form is MomentFormat.INT8:  # the block as a whole
            bad = {*range(BLOCK), *range(2 * BLOCK, 3 * BLOCK)}
            assert np.all(narrow[0][~finite] == 0)
        assert set(np.flatnonzero(~finite).tolist()) == bad
    assert not np.any(np.isfinite(s.weight[[3, 7]]))
    assert np.all(np.isfinite(np.delete(s.weight, [3, 7, 2 * BLOCK, 2 * BLOCK + 1])))


@pytest.mark.parametrize("isa", SETS)
def test_what_is_huge_saturates(isa):
    keep = np.array([[0, 0, 0.5, 1e30, 0, 1, 1]], np.float32)
    grad = np.array([3e38, -3e38, 1e30, 1.0], np.float32)
    for form, largest in ((MomentFormat.BF16, 3e38), (MomentFormat.INT8, 1.875 * 2.0**110)):
        m, v = empty(4, form), empty(4, form)
        _native.adamw(np.ones(4, np.float32), m, v, grad * np.float32(1), keep, 1.0, isa)
        got = decoded(m, Moment.EXP_AVG)
        assert np.all(np.isfinite(got))
        np.testing.assert_allclose(got[:2], [largest, -largest], rtol=0.01)
    top = np.array([3.3999e38, -3.4028e38], np.float32)
    m = empty(2, MomentFormat.BF16)
    _native.adamw(np.ones(2, np.float32), m, empty(2, MomentFormat.BF16), top, keep, 1.0, isa)
    assert m.tolist() == [0x7F7F, 0xFF7F]


@pytest.mark.parametrize("form", NARROW)
@quick
@given(st.integers(0, 700), seeds)
def test_encoding_is_to_nearest_and_decoding_exact(form, size, seed):
    rng = np.random.default_rng(seed)
    wild = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    normal = (rng.standard_normal(size) * np.exp(rng.standard_normal(size) * 3)).astype(np.float32)
    values = np.where(rng.random(size) < 0.01, wild, normal)
    for moment, signs in ((Moment.EXP_AVG, Signs.SIGNED), (Moment.EXP_AVG_SQ, Signs.UNSIGNED)):
        x = values if moment is Moment.EXP_AVG else np.abs(values)
        got = encoded(x, form, moment)
        if form is MomentFormat.BF16:
            assert np.array_equal(naive.widen(got), decoded(got, moment), equal_nan=True)
            real = ~np.isnan(x)
            assert np.array_equal(got[real], naive.to_bf16(x, 0x8000)[real])
            assert np.all(np.isnan(decoded(got, moment)[~real]))
        else:
            codes, scales = naive.to_int8(x, np.full(size, 1 << 19, np.uint32), signs)
            assert np.array_equal(got[0], codes)
            assert np.array_equal(got[1], scales, equal_nan=True)
            assert np.array_equal(naive.from_int8(codes, scales, signs), decoded(got, moment), equal_nan=True)
        again = decoded(encoded(decoded(got, moment), form, moment), moment)
        assert np.array_equal(again, decoded(got, moment), equal_nan=True)


@pytest.mark.parametrize("form", NARROW)
def test_zeros_are_the_state_before_the_first_step_and_stay(form):
    s = State(np.ones(300, np.float32), empty(300, form), empty(300, form))
    before = State(s.weight.copy(), empty(300, form), empty(300, form))
    s.run(np.array([[1e-3, 0.9, 0.999, 1e-8, 0, 0.1, 0.03]], np.float32), None)
    assert s.bits() == before.bits()


@pytest.mark.parametrize(("form", "factor"), [(MomentFormat.BF16, 1.05), (MomentFormat.INT8, 1.3)])
def test_a_regression_converges_as_with_torch(form, factor):
    # Features of very different sizes, so that gradients, and what blocks keep of them, differ by thousands.
    rng = np.random.default_rng(0)
    size, rows, steps = 640, 2000, 400
    features = (rng.standard_normal((rows, size)) * np.exp(rng.standard_normal(size))).astype(np.float32)
    target = features @ rng.standard_normal(size).astype(np.float32) + rng.standard_normal(rows) * 3
    batches = rng.integers(0, rows, (steps, 64))

    def grad_of(weight: Any, batch: Any) -> Any:
        x = features[batch]
        return (x.T @ (x @ weight - target[batch]) / len(batch)).astype(np.float32)

    def loss(weight: Any) -> float:
        return float(np.mean((features @ weight - target) ** 2))

    parameter = torch.nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.01)
    s = State(np.zeros(size, np.float32), empty(size, form), empty(size, form))
    for t, batch in enumerate(batches, 1):
        parameter.grad = torch.from_numpy(grad_of(parameter.detach().numpy(), batch))
        optimizer.step()
        row = [0.01, 0.9, 0.999, 1e-8, 0.01, 1 - 0.9**t, (1 - 0.999**t) ** 0.5]
        s.run(np.array([row], np.float32), grad_of(s.weight, batch) * 2)
    theirs = loss(parameter.detach().numpy())
    assert theirs < 0.2 * loss(np.zeros(size, np.float32))
    assert loss(s.weight) < factor * theirs


def test_what_does_not_fit_is_refused():
    weight, rows = np.zeros(300, np.float32), make_steps(1)
    bf16, int8 = empty(300, MomentFormat.BF16), empty(300, MomentFormat.INT8)
    with pytest.raises(ValueError, match="differ in format"):
        _native.adamw(weight, bf16, int8, None, rows)
    with pytest.raises(ValueError, match="exp_avg's scales: expected 2 elements, got 1"):
        _native.adamw(weight, (int8[0], int8[1][:1]), int8, None, rows)
    with pytest.raises(ValueError, match="starts within a block"):
        _native.adamw(weight, int8, int8, None, rows, first=128)
    with pytest.raises(ValueError, match="exp_avg_sq: expected 300 elements, got 299"):
        _native.adamw(weight, bf16, bf16[:299], None, rows)
    with pytest.raises(TypeError):
        _native.adamw(weight, bf16.astype(np.int16), bf16, None, rows)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="dst: expected 300 elements"):
        _native.encode_moment(Moment.EXP_AVG, bf16[:4], weight)
