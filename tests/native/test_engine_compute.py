"""Operations on memory: sums, AdamW over spans that do not match, and the chain read, step, write, read."""

import numpy as np
import pytest
from effort import share, with_fixtures
from engines import MakeEngine
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native as native


class Frames:
    """Deals out an arena's frames in random order, so that no section lies in one piece."""

    def __init__(self, arena: native.Arena, rng: np.random.Generator, frame_bytes: int = 4096) -> None:
        self._arena = arena
        self._frame_bytes = frame_bytes
        self._free = [int(frame) for frame in rng.permutation(arena.nbytes // frame_bytes)]

    def buffer(self, content: np.ndarray) -> native.Buffer:
        raw = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
        count = -(-raw.nbytes // self._frame_bytes)
        taken = [self._free.pop() for _ in range(count)]
        spans = [(self._frame_bytes * frame, self._frame_bytes) for frame in taken]
        buffer = native.Buffer(self._arena, spans, raw.nbytes)
        buffer.copy_from(raw)
        return buffer


def upper_halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``values`` in bf16, rounded towards zero, and these in fp32."""
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    return halves, (halves.astype(np.uint32) << 16).view(np.float32)


def content(buffer: native.Buffer, dtype: type) -> np.ndarray:
    out = np.empty(buffer.nbytes, dtype=np.uint8)
    buffer.copy_to(out)
    return out.view(dtype)


def step(lr: float = 1e-2, t: int = 1, decay: float = 0.1) -> list[float]:
    return [lr, 0.9, 0.999, 1e-8, decay, 1 - 0.9**t, (1 - 0.999**t) ** 0.5]


def adamw_oracle(
    weight: np.ndarray, m: np.ndarray, v: np.ndarray, grad: np.ndarray, steps: list[list[float]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """AdamW in float64, from the definition."""
    w, m, v = (x.astype(np.float64) for x in (weight, m, v))
    for i, (lr, beta1, beta2, eps, decay, correction1, correction2_sqrt) in enumerate(steps):
        g = grad.astype(np.float64) if i == len(steps) - 1 else np.zeros_like(w)
        w *= 1 - lr * decay
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w -= lr / correction1 * m / (np.sqrt(v) / correction2_sqrt + eps)
    return w, m, v


def test_accumulate(engine: native.Engine, arena: native.Arena, rng: np.random.Generator) -> None:
    frames = Frames(arena, rng)
    a, b = rng.standard_normal((2, 3000)).astype(np.float32)
    dst, src = frames.buffer(a), frames.buffer(b)
    first = engine.accumulate(dst, src)
    halves, widened = upper_halves(b)
    engine.wait(engine.accumulate(dst, frames.buffer(halves), native.Dtype.BF16, after=[first]))
    assert np.array_equal(content(dst, np.float32), a + b + widened)


def test_widen(engine: native.Engine, arena: native.Arena, rng: np.random.Generator) -> None:
    frames = Frames(arena, rng)
    values = rng.standard_normal(3000).astype(np.float32)
    halves, widened = upper_halves(values)
    dst = frames.buffer(np.zeros_like(values))
    engine.wait(engine.widen(dst, frames.buffer(halves), native.Dtype.BF16))
    assert np.array_equal(content(dst, np.float32), widened)
    engine.wait(engine.widen(dst, frames.buffer(values), native.Dtype.FP32))
    assert np.array_equal(content(dst, np.float32), values)


@pytest.mark.parametrize("count", [1, 1000, 4096, 20000])
def test_a_sum_of_squares_does_not_depend_on_where_it_lies(
    engine: native.Engine, rng: np.random.Generator, count: int
) -> None:
    values = rng.standard_normal(count).astype(np.float32)
    arena = native.Arena(2 << 20)
    small, odd = Frames(arena, rng), Frames(native.Arena(1 << 20), rng, 4 * 37)
    sums = native.DoubleTable(4)
    whole = native.Buffer(arena, [((1 << 20) + 4096, 4 * count)], 4 * count)
    whole.array()[:] = values.view(np.uint8)
    arenas = Frames(native.Arena(1 << 20), rng)
    for index, buffer in enumerate((arenas.buffer(values), odd.buffer(values), whole)):
        engine.wait(engine.sum_of_squares(buffer, sums, index))
    del small
    result = sums.array()
    halves, widened = upper_halves(values)
    narrow = native.DoubleTable(3)
    for index, buffer in enumerate((arenas.buffer(halves), odd.buffer(halves))):
        engine.wait(engine.sum_of_squares(buffer, narrow, index, native.Dtype.BF16))
    engine.wait(engine.sum_of_squares(arenas.buffer(widened), narrow, 2))
    assert len(set(narrow.array().tolist())) == 1
    assert result[0] == result[1] == result[2]
    assert result[0] == pytest.approx(float(np.sum(values.astype(np.float64) ** 2)), rel=1e-12)
    assert result[3] == 0


@with_fixtures(30)
@given(
    count=st.sampled_from([1, 15, 4095, 4096, 4097, 40_001, (1 << 20) + 4097]),
    narrow=st.booleans(),
    moments=st.sampled_from(list(native.MomentFormat)),
    missed=st.integers(0, 2),
    scattered=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_adamw_gives_the_sum_of_squares_of_its_gradient(
    engine: native.Engine,
    count: int,
    narrow: bool,
    moments: native.MomentFormat,
    missed: int,
    scattered: bool,
    seed: int,
) -> None:
    """The bits of ``sum_of_squares`` before the gradient is scaled, and the step's own bits without the sum: also where a
    large record is cut into parts for several threads, and where spans divide blocks.
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count).astype(np.float32) * np.float32(1e-3)
    gradient = upper_halves(values)[0] if narrow else values
    dtype = native.Dtype.BF16 if narrow else native.Dtype.FP32
    int8 = moments is native.MomentFormat.INT8
    width = {native.MomentFormat.FP32: np.float32, native.MomentFormat.BF16: np.uint16}.get(moments, np.uint8)
    table = np.array([step(1e-2, i + 1) for i in range(missed + 1)], np.float32)
    arena = native.Arena(64 << 20)
    frames = Frames(arena, rng) if scattered else None
    used = 0

    def buffer(values: np.ndarray) -> native.Buffer:
        nonlocal used
        if frames is not None:
            return frames.buffer(values)
        room = -(-values.nbytes // 4096) * 4096
        made = native.Buffer(arena, [(used, room)], values.nbytes)
        made.copy_from(values.view(np.uint8))
        used += room
        return made

    found = []
    sums = native.DoubleTable(3)
    for squares in (None, sums):
        weight = buffer(np.linspace(-1, 1, count, dtype=np.float32))
        m, v = (buffer(np.zeros(count, width)) for _ in range(2))
        scales = [buffer(np.zeros(-(-count // native.MOMENT_BLOCK), np.float32)) for _ in range(2 * int8)]
        grad = buffer(gradient)
        options = {"moments": moments, "scales": scales, "record_hash": 7, "last_step": 5}
        engine.wait(engine.adamw([weight], m, v, grad, table, 0.37, squares=squares, index=1, **options))
        found.append([content(each, np.uint8).tobytes() for each in (weight, m, v, *scales)])
    engine.wait(engine.sum_of_squares(grad, sums, 2, dtype))
    _, fused, alone = sums.array()
    assert fused == alone > 0
    assert found[0] == found[1]


def test_adamw_without_a_gradient_has_no_sum(engine: native.Engine, arena: native.Arena) -> None:
    weight, m, v = (native.Buffer(arena, [(i * 4096, 4096)], 4096) for i in range(3))
    table = np.array([step(1e-2, 1)], np.float32)
    with pytest.raises(ValueError, match="adamw: squares: there is no gradient"):
        engine.adamw([weight], m, v, None, table, squares=native.DoubleTable(1))
    with pytest.raises(ValueError, match="adamw: index is outside the table"):
        engine.adamw([weight], m, v, v, table, squares=native.DoubleTable(1), index=1)


@pytest.mark.parametrize("missed", [0, 3])
def test_adamw_over_sections_whose_spans_do_not_match(
    engine: native.Engine, rng: np.random.Generator, missed: int
) -> None:
    count = 5000
    weight, m, grad = rng.standard_normal((3, count)).astype(np.float32)
    v = rng.random(count).astype(np.float32)
    arena = native.Arena(4 << 20)
    steps = [step(1e-2 / (i + 1), i + 1) for i in range(missed + 1)]
    want_w, want_m, want_v = adamw_oracle(weight, m, v, grad * np.float32(0.5), steps)

    frames = Frames(arena, rng)
    buffers = [frames.buffer(x) for x in (weight, m, v, grad)]
    table = np.array(steps, dtype=np.float32)
    ticket = engine.adamw(buffers[:1], buffers[1], buffers[2], buffers[3], table, 0.5)
    table[:] = np.nan  # copied when submitted
    engine.wait(ticket)
    got_w = content(buffers[0], np.float32)
    np.testing.assert_allclose(got_w, want_w, rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(content(buffers[1], np.float32), want_m, rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(content(buffers[2], np.float32), want_v, rtol=2e-6, atol=2e-7)

    # The split master, in two-byte sections beside four-byte ones: the same bits.
    bits = weight.view(np.uint32)
    high = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    low = (bits.astype(np.int64) - (high.astype(np.int64) << 16)).astype(np.int16)
    hi, lo = frames.buffer(high), frames.buffer(low)
    moments = [frames.buffer(x) for x in (m, v)]
    table = np.array(steps, dtype=np.float32)
    engine.wait(engine.adamw([hi, lo], moments[0], moments[1], frames.buffer(grad), table, 0.5))
    merged = (content(hi, np.uint16).astype(np.int64) << 16) + content(lo, np.int16)
    assert np.array_equal(merged.astype(np.uint32), got_w.view(np.uint32))


def test_adamw_without_a_gradient(
    engine: native.Engine, arena: native.Arena, rng: np.random.Generator
) -> None:
    frames = Frames(arena, rng)
    weight, m = rng.standard_normal((2, 2000)).astype(np.float32)
    v = rng.random(2000).astype(np.float32)
    zero = np.zeros_like(weight)
    table = np.array([step()], dtype=np.float32)
    results = []
    for grad in (None, frames.buffer(zero)):
        parts = [frames.buffer(x) for x in (weight, m, v)]
        engine.wait(engine.adamw(parts[:1], parts[1], parts[2], grad, table))
        results.append([content(part, np.uint32) for part in parts])
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


def test_read_step_write_read(
    engine: native.Engine, arena: native.Arena, file: native.File, rng: np.random.Generator
) -> None:
    """The life of a record, queued in one go."""
    frames = Frames(arena, rng)
    weight, m, grad = rng.standard_normal((3, 3000)).astype(np.float32)
    v = rng.random(3000).astype(np.float32)
    crcs = native.CrcTable(6)
    wrote = engine.write(file, 0, [frames.buffer(x) for x in (weight, m, v)], crcs)
    record = [frames.buffer(np.zeros_like(weight)) for _ in range(3)]
    read = engine.read(file, 0, record, crcs, after=[wrote])
    table = np.array([step()], dtype=np.float32)
    stepped = engine.adamw(record[:1], record[1], record[2], frames.buffer(grad), table, after=[read])
    rewritten = engine.write(file, 65536, record, crcs, 3, after=[stepped])
    wiped = [engine.fill_zero(part, after=[rewritten]) for part in record]
    final = engine.read(file, 65536, record, crcs, 3, after=wiped)
    engine.wait(final)
    want = adamw_oracle(weight, m, v, grad, [step()])
    for part, expected in zip(record, want, strict=True):
        np.testing.assert_allclose(content(part, np.float32), expected, rtol=2e-6, atol=2e-7)


@with_fixtures(share(30))
@given(data=st.data())
def test_copies_between_spans_of_any_shape(engine: native.Engine, data: st.DataObject) -> None:
    arena = native.Arena(1 << 16, native.HugePages.OFF)
    nbytes = data.draw(st.integers(1, 4000))

    def cut(base: int) -> native.Buffer:
        cuts = sorted(data.draw(st.lists(st.integers(0, nbytes), max_size=5)))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True)]
        places = data.draw(st.permutations(range(len(sizes))))
        return native.Buffer(
            arena, [(base + 4096 * p, n) for p, n in zip(places, sizes, strict=True)], nbytes
        )

    dst, src = cut(0), cut(32768)
    values = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    src.copy_from(values)
    engine.wait(engine.copy(dst, src))
    assert np.array_equal(content(dst, np.uint8), values)
    assert int(arena.view(0, 32768).astype(np.int64).sum()) == int(values.astype(np.int64).sum())


def test_sizes_that_do_not_match(engine: native.Engine, arena: native.Arena) -> None:
    def buffer(nbytes: int, *spans: tuple[int, int]) -> native.Buffer:
        return native.Buffer(arena, spans or [(0, nbytes)], nbytes)

    table = np.array([step()], dtype=np.float32)
    good = buffer(400)
    with pytest.raises(ValueError, match="differ in size"):
        engine.copy(good, buffer(404))
    with pytest.raises(ValueError, match="whole number"):
        engine.accumulate(good, buffer(402))
    with pytest.raises(ValueError, match="accumulate: dst: expected 800 bytes"):
        engine.accumulate(good, good, native.Dtype.BF16)
    with pytest.raises(ValueError, match="divide an element"):
        engine.accumulate(good, buffer(400, (0, 6), (1000, 394)))
    with pytest.raises(ValueError, match="divide an element"):
        engine.sum_of_squares(buffer(400, (2, 400)), native.DoubleTable(1), 0)
    with pytest.raises(ValueError, match="widen: dst: expected 800 bytes"):
        engine.widen(good, good, native.Dtype.BF16)
    with pytest.raises(ValueError, match="sum_of_squares: src: expected 400 bytes, got 401"):
        engine.sum_of_squares(buffer(401), native.DoubleTable(1), 0, native.Dtype.BF16)
    with pytest.raises(ValueError, match="outside the table"):
        engine.sum_of_squares(good, native.DoubleTable(1), 1)
    with pytest.raises(ValueError, match="exp_avg_sq: expected 400"):
        engine.adamw([good], good, buffer(404), None, table)
    with pytest.raises(ValueError, match="weight: expected 200"):
        engine.adamw([good, good], good, good, None, table)
    with pytest.raises(ValueError, match=r"weight is \[fp32\]"):
        engine.adamw([], good, good, None, table)
    with pytest.raises(ValueError, match="grad: expected 400"):
        engine.adamw([good], good, good, buffer(4), table)
    with pytest.raises(ValueError, match="at least one step"):
        engine.adamw([good], good, good, None, np.empty((0, 7), dtype=np.float32))
    for wrong in (table.astype(np.float64), table[:, :6], np.zeros((2, 14), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            engine.adamw([good], good, good, None, wrong)  # type: ignore[arg-type]
    assert engine.stats()["compute_ops"] == 0


@pytest.mark.parametrize("missed", [0, 7])
def test_a_long_adamw_on_several_threads_has_the_bits_of_one(
    make_engine: MakeEngine, rng: np.random.Generator, missed: int
) -> None:
    """Parts begin in the middle of spans: sections lie differently, and the number of elements is odd."""
    count = (1 << 20) + 12_347
    weight, m, grad = rng.standard_normal((3, count)).astype(np.float32)
    v = rng.random(count).astype(np.float32)
    table = np.array([step(1e-2 / (i + 1), i + 1) for i in range(missed + 1)], dtype=np.float32)
    results = []
    for threads in (1, 2, 3):
        engine = make_engine(compute_threads=threads)
        frames = Frames(native.Arena(24 << 20), rng)
        buffers = [frames.buffer(x) for x in (weight, m, v, grad)]
        engine.wait(engine.adamw(buffers[:1], buffers[1], buffers[2], buffers[3], table, 0.5))
        assert engine.stats()["compute_ops"] == 1
        results.append([content(buffer, np.uint32) for buffer in buffers[:3]])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert np.array_equal(got, want)
    alone = [weight.copy(), m.copy(), v.copy()]
    native.adamw(*alone, grad, table, 0.5)
    for got, want in zip(results[0], alone, strict=True):
        assert np.array_equal(got, want.view(np.uint32))
