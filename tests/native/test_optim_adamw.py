"""AdamW: by hand, against torch, the same bits on every instruction set, missed steps, split weights."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_moments import make_steps

from tierstore import _native
from tierstore._native import InstructionSet

SETS = [s for s in InstructionSet if _native.instruction_set_supported(s)]
quick = settings(max_examples=share(40))
seeds = st.integers(0, 2**32 - 1)


@dataclass
class State:
    weight: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    grad: np.ndarray

    def copy(self) -> "State":
        return State(*(placed(a, 0) for a in (self.weight, self.exp_avg, self.exp_avg_sq, self.grad)))

    def bits(self) -> bytes:
        return self.weight.tobytes() + self.exp_avg.tobytes() + self.exp_avg_sq.tobytes()


def placed(values: np.ndarray, offset: int) -> np.ndarray:
    """A copy that starts ``offset`` elements into its memory, so that registers straddle cache lines."""
    memory = np.empty(values.size + offset, values.dtype)
    memory[offset:] = values
    return memory[offset:]


def make_state(size: int, seed: int, offsets: tuple[int, int, int, int] = (0, 0, 0, 0)) -> State:
    """Values over the whole range of fp32: signed zeros, subnormals, the smallest normals, the huge."""
    rng = np.random.default_rng(seed)

    def values() -> np.ndarray:
        normal = rng.standard_normal(size).astype(np.float32)
        wild = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
        wild = np.where(np.isfinite(wild), wild, np.float32(3e38))
        edge = rng.choice(
            np.array([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, -1.3e-38, 1e-20, 3e38, -3e38], np.float32), size
        )
        return np.choose(rng.integers(0, 3, size), [normal, wild, edge])

    w, m, v, g = (placed(values(), offset) for offset in offsets)
    np.abs(v, out=v)
    return State(w, m, v, g)


def canonical(bits: bytes) -> bytes:
    """Every NaN as one NaN: payloads are not promised."""
    values = np.frombuffer(bits, np.float32).copy()
    values[np.isnan(values)] = np.nan
    return values.tobytes()


def run(
    s: State, steps: np.ndarray, grad: bool = True, scale: float = 1.0, isa: InstructionSet | None = None
):
    _native.adamw(s.weight, s.exp_avg, s.exp_avg_sq, s.grad if grad else None, steps, scale, isa)


def test_two_steps_by_hand():
    # lr = 0.1, beta1 = 0.5, beta2 = 0.75, eps = 0, weight decay 0.5; p = 1, gradients 2 and then none.
    # t = 1: p = 1 * 0.95;  m = 0.5 * 2 = 1;  v = 0.25 * 4 = 1;  m_hat = 1 / 0.5 = 2;  v_hat = 1 / 0.25 = 4;
    #        p = 0.95 - 0.1 * 2 / 2 = 0.85
    # t = 2: p = 0.85 * 0.95 = 0.8075;  m = 0.5;  v = 0.75;  m_hat = 0.5 / 0.75 = 2/3;
    #        v_hat = 0.75 / (1 - 0.5625) = 12/7;  p = 0.8075 - 0.1 * (2/3) / sqrt(12/7) = 0.756583...
    steps = np.array(
        [[0.1, 0.5, 0.75, 0, 0.5, 0.5, 0.5], [0.1, 0.5, 0.75, 0, 0.5, 0.75, 0.4375**0.5]], np.float32
    )
    p, m, v = np.ones(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    _native.adamw(p, m, v, np.array([4], np.float32), steps[:1], 0.5)
    assert p[0] == pytest.approx(0.85, rel=1e-7)
    assert (m[0], v[0]) == (1.0, 1.0)
    _native.adamw(p, m, v, None, steps[1:])
    assert p[0] == pytest.approx(0.8075 - 0.1 * (2 / 3) / (12 / 7) ** 0.5, rel=1e-7)
    assert (m[0], v[0]) == (0.5, 0.75)
    # The same first step with its gradient in bf16: 4 is 2 * 2^1, an exponent of 127 + 2 above seven bits of zeros.
    p, m, v = np.ones(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    _native.adamw(p, m, v, np.array([129 << 7], np.uint16), steps[:1], 0.5)
    assert p[0] == pytest.approx(0.85, rel=1e-7)
    assert (m[0], v[0]) == (1.0, 1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_equals_torch_under_a_changing_learning_rate(fused):
    rng = np.random.default_rng(3)
    size, decay = 1003, 0.1
    s = State(rng.standard_normal(size).astype(np.float32), *(np.zeros(size, np.float32) for _ in range(3)))
    parameter = torch.tensor(s.weight.copy(), requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=decay, fused=fused)
    for t in range(1, 21):
        lr = 1e-3 * (1 + t % 5)
        s.grad = rng.standard_normal(size).astype(np.float32) * np.float32(10.0 ** rng.integers(-6, 3))
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.from_numpy(s.grad.copy())
        optimizer.step()
        row = [lr, 0.9, 0.999, 1e-8, decay, 1 - 0.9**t, (1 - 0.999**t) ** 0.5]
        run(s, np.array([row], np.float32))
    state = optimizer.state[parameter]
    # Where terms cancel, fp32 leaves an error of the terms' size: hence the absolute part.
    for ours, theirs in [
        (s.weight, parameter.detach()),
        (s.exp_avg, state["exp_avg"]),
        (s.exp_avg_sq, state["exp_avg_sq"]),
    ]:
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


@quick
@given(st.integers(0, 150), st.tuples(*[st.integers(0, 17)] * 4), seeds, st.integers(1, 5), st.booleans())
def test_every_instruction_set_gives_the_same_bits(size, offsets, seed, count, grad):
    start = make_state(size, seed, offsets)
    results = set()
    for isa in SETS:
        s = State(*(placed(a, o) for a, o in zip(vars(start).values(), offsets, strict=True)))
        run(s, make_steps(count), grad, 0.37, isa)
        results.add(canonical(s.bits()))
    assert len(results) == 1


@quick
@given(st.integers(1, 100), seeds, st.integers(1, 12), st.booleans(), st.sampled_from(SETS))
def test_missed_steps_in_one_pass_equal_separate_steps(size, seed, count, grad, isa):
    together = make_state(size, seed)
    apart = together.copy()
    steps = make_steps(count)
    run(together, steps, grad, 0.5, isa)
    for row in steps[:-1]:
        run(apart, row[None], grad=False, isa=isa)
    run(apart, steps[-1:], grad, 0.5, isa)
    assert canonical(together.bits()) == canonical(apart.bits())


@quick
@given(st.integers(1, 100), seeds, st.sampled_from(SETS))
def test_no_gradient_is_a_gradient_of_zero(size, seed, isa):
    absent = make_state(size, seed)
    zero = absent.copy()
    zero.grad[:] = 0
    run(absent, make_steps(3), grad=False, isa=isa)
    run(zero, make_steps(3), grad=True, isa=isa)
    assert canonical(absent.bits()) == canonical(zero.bits())


@quick
@given(st.integers(0, 150), seeds, st.integers(1, 4), st.booleans(), st.sampled_from(SETS))
def test_a_split_weight_takes_the_same_steps(size, seed, count, grad, isa):
    whole = make_state(size, seed)
    split = whole.copy()
    hi, lo = placed(np.empty(size, np.uint16), 3), placed(np.empty(size, np.int16), 5)
    _native.split_bf16(hi, lo, split.weight)
    run(whole, make_steps(count), grad, isa=isa)
    moments = (split.exp_avg, split.exp_avg_sq)
    _native.adamw((hi, lo), *moments, split.grad if grad else None, make_steps(count), 1.0, isa)
    _native.merge_bf16(split.weight, hi, lo)
    assert canonical(split.bits()) == canonical(whole.bits())


@quick
@given(st.integers(0, 300), seeds, st.integers(1, 4), st.booleans(), st.sampled_from(SETS))
def test_a_gradient_in_bf16_is_the_same_in_fp32(size, seed, count, split, isa):
    wide = make_state(size, seed)
    grad = placed((wide.grad.view(np.uint32) >> 16).astype(np.uint16), seed % 7)
    wide.grad = (grad.astype(np.uint32) << 16).view(np.float32)
    narrow = wide.copy()
    halves = np.empty(size, np.uint16), np.empty(size, np.int16)
    _native.split_bf16(*halves, wide.weight)
    run(wide, make_steps(count), scale=0.37, isa=isa)
    weight = halves if split else narrow.weight
    _native.adamw(weight, narrow.exp_avg, narrow.exp_avg_sq, grad, make_steps(count), 0.37, isa)
    if split:
        _native.merge_bf16(narrow.weight, *halves)
    assert canonical(narrow.bits()) == canonical(wide.bits())


@pytest.mark.parametrize("isa", SETS)
def test_every_low_half_is_split_alike(isa):
    # A step that does not move: every low half, ties among them, comes back as split_bf16 made it.
    still = np.array([[0, 0.9, 0.999, 1e-8, 0, 1, 1]], np.float32)
    low = np.arange(2**16, dtype=np.uint32)
    for high in (0x0080, 0x3F80, 0x7F7F, 0xBF81, 0xFF7F):
        bits = np.uint32(high << 16) | low
        hi, lo = np.empty(low.size, np.uint16), np.empty(low.size, np.int16)
        _native.split_bf16(hi, lo, bits.view(np.float32))
        stepped = hi.copy(), lo.copy()
        _native.adamw(stepped, *np.zeros((2, low.size), np.float32), None, still, 1.0, isa)
        np.testing.assert_array_equal(stepped[0], hi)
        np.testing.assert_array_equal(stepped[1], lo)


@pytest.mark.parametrize("isa", SETS)
def test_moments_end_as_zeros_not_as_subnormals(isa):
    s = State(*(np.full(37, x, np.float32) for x in (1.0, 1e-36, 1e-36, 0.0)))
    seen = []
    for t in range(1, 121):
        run(s, make_steps(1, t), grad=False, isa=isa)
        seen.append(float(s.exp_avg[0]))
    assert seen[-1] == 0
    tiny = np.finfo(np.float32).tiny
    assert all(x == 0 or x >= tiny for x in seen)


def test_the_callers_float_mode_is_restored():
    run(make_state(5, 0), make_steps(1))
    subnormal = np.array([1e-40], np.float32)
    assert (subnormal * np.float32(0.5))[0] > 0
    torch.set_flush_denormal(True)
    try:
        total = _native.sum_of_squares(subnormal)
        run(make_state(5, 0), make_steps(1))
        assert float(torch.from_numpy(subnormal).mul(1.0)) == 0
    finally:
        torch.set_flush_denormal(False)
    assert total == float(subnormal[0]) ** 2


def test_no_steps_change_nothing():
    s = make_state(20, 1)
    before = s.bits()
    run(s, make_steps(0))
    assert s.bits() == before


@pytest.mark.parametrize(
    "change",
    [
        {"weight": np.zeros(4, np.float64)},  # would be converted, and the update lost
        {"weight": np.zeros(8, np.float32)[::2]},
        {"exp_avg": np.zeros(4, np.float32).view(np.int32)},
        {"steps": np.zeros((1, 6), np.float32)},
    ],
)
def test_what_would_need_a_copy_is_refused(change):
    a = {name: np.zeros(4, np.float32) for name in ("weight", "exp_avg", "exp_avg_sq", "grad")}
    with pytest.raises(TypeError):
        _native.adamw(**{**a, "steps": make_steps(1), **change})


def test_a_read_only_weight_is_refused():
    w, m, v = (np.zeros(4, np.float32) for _ in range(3))
    w.flags.writeable = False
    with pytest.raises(TypeError):
        _native.adamw(w, m, v, None, make_steps(1))


def test_lengths_must_agree():
    w, m, v = np.zeros(4, np.float32), np.zeros(4, np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="exp_avg_sq: expected 4 elements, got 3"):
        _native.adamw(w, m, v, None, make_steps(1))
    for grad in (v, np.zeros(3, np.uint16)):
        with pytest.raises(ValueError, match="grad: expected 4 elements, got 3"):
            _native.adamw(w, m, m.copy(), grad, make_steps(1))
