"""The engine's AdamW with narrow moments: sections in spans of any shape, on several threads, have the kernel's bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from effort import share, with_fixtures
from engines import MakeEngine
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native as native
from tierstore._native import MomentFormat

BLOCK = native.MOMENT_BLOCK
RECORD = 0x123456789ABCDEF0
DTYPES = {MomentFormat.BF16: np.uint16, MomentFormat.INT8: np.uint8}


def make_rows(count: int) -> npt.NDArray[np.float32]:
    return np.array(
        [(1e-2, 0.9, 0.999, 1e-8, 0.1, 1 - 0.9**t, (1 - 0.999**t) ** 0.5) for t in range(1, count + 1)],
        np.float32,
    )


@dataclass
class Record:
    """Arrays of one record: the weight (or its halves), the moments, the scales, the gradient."""

    weight: list[npt.NDArray[Any]]
    moments: list[npt.NDArray[Any]]
    scales: list[npt.NDArray[np.float32]]
    grad: npt.NDArray[Any]

    @classmethod
    def made(
        cls, count: int, form: MomentFormat, rng: np.random.Generator, split: bool, narrow: bool = False
    ) -> Record:
        weight, m, grad = rng.standard_normal((3, count)).astype(np.float32)
        parts: list[npt.NDArray[Any]] = [weight]
        if split:
            parts = [np.empty(count, np.uint16), np.empty(count, np.int16)]
            native.split_bf16(parts[0], parts[1], weight)
        moments: list[npt.NDArray[Any]] = [np.empty(count, DTYPES[form]) for _ in range(2)]
        scales = [np.empty(-(-count // BLOCK), np.float32) for _ in range(2)]
        for moment, values, out, scale in zip(native.Moment, (m, m * m), moments, scales, strict=True):
            native.encode_moment(moment, (out, scale) if form is MomentFormat.INT8 else out, values)
        if narrow:
            grad = (grad.view(np.uint32) >> 16).astype(np.uint16)
        return cls(parts, moments, scales if form is MomentFormat.INT8 else [], grad)

    def alone(self, rows: Any, number: int, grad: bool) -> list[bytes]:
        """What the kernel makes of copies of the arrays."""
        weight = [a.copy() for a in self.weight]
        moments = [a.copy() for a in self.moments]
        scales = [a.copy() for a in self.scales]
        m, v = zip(moments, scales, strict=True) if scales else moments
        native.adamw(
            weight[0] if len(weight) == 1 else tuple(weight),  # type: ignore[call-overload]
            m,
            v,
            self.grad if grad else None,
            rows,
            0.5,
            record_hash=RECORD,
            last_step=number,
        )
        return [a.tobytes() for a in (*weight, *moments, *scales)]

    def sections(self) -> list[npt.NDArray[Any]]:
        return [*self.weight, *self.moments, *self.scales, self.grad]

    def queue(
        self, engine: native.Engine, buffers: list[native.Buffer], rows: Any, number: int, grad: bool
    ) -> int:
        count = len(self.weight)
        form = MomentFormat.INT8 if self.scales else MomentFormat.BF16
        return engine.adamw(
            buffers[:count],
            buffers[count],
            buffers[count + 1],
            buffers[-1] if grad else None,
            rows,
            0.5,
            moments=form,
            scales=buffers[count + 2 : -1],
            record_hash=RECORD,
            last_step=number,
        )


def content(buffer: native.Buffer) -> bytes:
    out = np.empty(buffer.nbytes, np.uint8)
    buffer.copy_to(out)
    return out.tobytes()


@with_fixtures(share(60))
@given(data=st.data())
def test_spans_of_any_shape(engine: native.Engine, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(list(DTYPES)))
    count = data.draw(st.integers(1, 1500))
    split, narrow = data.draw(st.booleans()), data.draw(st.booleans())
    record = Record.made(count, form, np.random.default_rng(count), split, narrow)
    arena = native.Arena(1 << 18, native.HugePages.OFF)
    buffers, room = [], 1 << 14
    for index, array in enumerate(record.sections()):
        cuts = sorted(data.draw(st.lists(st.integers(0, array.size), max_size=4)))
        sizes = [array.itemsize * (b - a) for a, b in zip([0, *cuts], [*cuts, array.size], strict=True)]
        base = 2 * index * room
        places = data.draw(st.permutations(range(len(sizes))))
        # The pieces follow one another in memory, in another order than in the section.
        starts = np.concatenate([[0], np.cumsum([sizes[p] for p in places])])
        at = {p: base + int(starts[i]) for i, p in enumerate(places)}
        buffers.append(native.Buffer(arena, [(at[i], n) for i, n in enumerate(sizes)], array.nbytes))
        buffers[-1].copy_from(array.view(np.uint8))
    rows, grad = make_rows(data.draw(st.integers(1, 3))), data.draw(st.booleans())
    engine.wait(record.queue(engine, buffers, rows, 77, grad))
    assert [content(b) for b in buffers[:-1]] == record.alone(rows, 77, grad)
    assert content(buffers[-1]) == record.grad.tobytes()


@pytest.mark.parametrize("form", list(DTYPES))
def test_several_threads_have_the_bits_of_one(
    make_engine: MakeEngine, rng: np.random.Generator, form: MomentFormat
) -> None:
    record = Record.made((1 << 19) + 12_347, form, rng, False)
    rows = make_rows(3)
    want = record.alone(rows, 5, True)
    for threads in (1, 2, 3):
        engine = make_engine(compute_threads=threads)
        buffers = []
        for array in record.sections():
            nbytes = -(-array.nbytes // 4096) * 4096
            buffers.append(native.Buffer(native.Arena(nbytes), [(0, nbytes)], array.nbytes))
            buffers[-1].copy_from(array.view(np.uint8))
        engine.wait(record.queue(engine, buffers, rows, 5, True))
        assert [content(b) for b in buffers[:-1]] == want


def test_sections_that_do_not_match(engine: native.Engine, arena: native.Arena) -> None:
    def buffer(nbytes: int) -> native.Buffer:
        return native.Buffer(arena, [(0, nbytes)], nbytes)

    rows, weight, codes, scale = make_rows(1), buffer(4000), buffer(1000), buffer(16)
    with pytest.raises(ValueError, match="exp_avg_sq: expected 2000 bytes, got 1000"):
        engine.adamw([weight], buffer(2000), codes, None, rows, moments=MomentFormat.BF16)
    with pytest.raises(ValueError, match="scales are"):
        engine.adamw([weight], codes, codes, None, rows, moments=MomentFormat.INT8)
    with pytest.raises(ValueError, match="scales are"):
        engine.adamw([weight], weight, weight, None, rows, scales=[scale, scale])
    with pytest.raises(ValueError, match="scales: expected 16 bytes, got 12"):
        engine.adamw(
            [weight], codes, codes, None, rows, moments=MomentFormat.INT8, scales=[scale, buffer(12)]
        )
    assert engine.stats()["compute_ops"] == 0
