"""Arenas, buffers over their spans, and tables."""

import errno
import gc
import signal

import numpy as np
import psutil
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _native as native


def test_arena_is_zeroed_aligned_and_of_the_size_asked_for() -> None:
    arena = native.Arena(3 * 4096 + 5)
    assert arena.nbytes == 3 * 4096 + 5
    assert arena.address % (2 << 20) == 0
    view = arena.view()
    assert view.shape == (arena.nbytes,)
    assert view.ctypes.data == arena.address
    assert not view.any()


def test_arena_views_are_writable_and_share_memory() -> None:
    arena = native.Arena(8192)
    arena.view(4096, 4)[:] = [1, 2, 3, 4]
    assert arena.view(4094, 8).tolist() == [0, 0, 1, 2, 3, 4, 0, 0]
    assert arena.view(8192).size == 0
    for offset, nbytes in ((8193, 0), (0, 8193), (4096, 4097), (1, 2**64 - 1)):
        with pytest.raises(IndexError):
            arena.view(offset, nbytes)


def test_views_keep_the_arena_alive() -> None:
    view = native.Arena(1 << 20).view()
    buffer = native.Buffer(native.Arena(4096), [(0, 4096)], 4096)
    gc.collect()
    view[:] = 7
    buffer.array()[:] = 8
    assert int(view.sum()) == 7 << 20
    assert int(buffer.array().sum()) == 8 * 4096


def test_memory_that_is_not_to_be_had_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="arena of") as error:
        native.Arena(1 << 46)
    assert error.value.errno == errno.ENOMEM
    with pytest.raises(ValueError, match="at least 1 byte"):
        native.Arena(0)


def test_who_populates_hears_of_it_and_can_end_it() -> None:
    heard: list[int] = []
    native.Arena(200 << 20, progress=heard.append)
    assert heard
    assert heard == sorted(heard)
    assert heard[0] >= 64 << 20
    assert heard[-1] <= 200 << 20

    def refuse(nbytes: int) -> None:
        raise ZeroDivisionError

    before = psutil.Process().memory_info().rss
    with pytest.raises(ZeroDivisionError):
        native.Arena(200 << 20, progress=refuse)
    assert psutil.Process().memory_info().rss < before + (32 << 20)


def test_signals_are_handled_meanwhile() -> None:
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    made = []

    def make() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        made.append(native.Arena(512 << 20))
        signal.pause()

    handler = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(Alarm):
            make()
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert made == []


def test_huge_pages() -> None:
    assert native.Arena(8 << 20, native.HugePages.OFF).huge_bytes == 0
    arena = native.Arena(8 << 20, native.HugePages.AUTO)
    assert 0 <= arena.huge_bytes <= arena.nbytes
    if arena.huge_bytes > 0:
        assert native.Arena(8 << 20, native.HugePages.ON).huge_bytes > 0
    with pytest.raises(OSError, match="huge pages"):
        native.Arena(4096, native.HugePages.ON)  # too small for one


def test_a_buffer_over_scattered_spans(arena: native.Arena) -> None:
    # Worked by hand: 10 bytes over spans of 4, 2 and 8 bytes, in this order; 4 bytes of room are left.
    buffer = native.Buffer(arena, [(100, 4), (50, 2), (200, 8)], 10)
    assert (buffer.nbytes, buffer.capacity, buffer.contiguous) == (10, 14, False)
    assert buffer.spans == [(100, 4), (50, 2), (200, 8)]
    buffer.copy_from(np.arange(1, 11, dtype=np.uint8))
    whole = arena.view()
    assert whole[100:104].tolist() == [1, 2, 3, 4]
    assert whole[50:52].tolist() == [5, 6]
    assert whole[200:208].tolist() == [7, 8, 9, 10, 0, 0, 0, 0]
    assert [a.tolist() for a in buffer.arrays()] == [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
    out = np.zeros(10, dtype=np.uint8)
    buffer.copy_to(out)
    assert out.tolist() == list(range(1, 11))
    with pytest.raises(ValueError, match="several pieces"):
        buffer.array()


def test_adjacent_spans_are_one_piece(arena: native.Arena) -> None:
    buffer = native.Buffer(arena, [(0, 4096), (4096, 4096), (8192, 4096)], 10000)
    assert buffer.contiguous
    assert buffer.array().shape == (10000,)
    assert len(buffer.arrays()) == 1


def test_buffers_refuse_what_cannot_be(arena: native.Arena) -> None:
    with pytest.raises(IndexError, match="outside its arena"):
        native.Buffer(arena, [(arena.nbytes - 4, 8)], 8)
    with pytest.raises(IndexError, match="outside its arena"):
        native.Buffer(arena, [(2**64 - 8, 16)], 8)
    with pytest.raises(ValueError, match="cannot hold"):
        native.Buffer(arena, [(0, 4), (8, 4)], 9)
    buffer = native.Buffer(arena, [(0, 8)], 8)
    with pytest.raises(ValueError, match="8 bytes"):
        buffer.copy_from(np.zeros(7, dtype=np.uint8))
    with pytest.raises(ValueError, match="8 bytes"):
        buffer.copy_to(np.zeros(9, dtype=np.uint8))
    with pytest.raises(TypeError):
        buffer.copy_to(np.zeros(2, dtype=np.float32))
    with pytest.raises(TypeError):
        buffer.copy_to(np.zeros(16, dtype=np.uint8)[::2])


@settings(max_examples=share(50))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.randoms(use_true_random=False), st.data())
def test_gather_undoes_scatter(capacities: list[int], random: object, data: st.DataObject) -> None:
    arena = native.Arena(4096, native.HugePages.OFF)
    places = data.draw(st.permutations(range(len(capacities))))
    spans = [(64 * place, capacity) for place, capacity in zip(places, capacities, strict=True)]
    nbytes = data.draw(st.integers(0, sum(capacities)))
    content = np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype=np.uint8)
    buffer = native.Buffer(arena, spans, nbytes)
    buffer.copy_from(content.copy())
    out = np.empty(nbytes, dtype=np.uint8)
    buffer.copy_to(out)
    assert out.tolist() == content.tolist()
    assert b"".join(a.tobytes() for a in buffer.arrays()) == content.tobytes()
    assert int(arena.view().astype(np.int64).sum()) == int(
        content.astype(np.int64).sum()
    )  # nothing elsewhere


@pytest.mark.parametrize("nbytes", [(1 << 20) - 1, (1 << 20) + 77])
@pytest.mark.parametrize("skew", [0, 1, 63])
def test_large_copies_are_exact(
    arena: native.Arena, rng: np.random.Generator, nbytes: int, skew: int
) -> None:
    content = rng.integers(0, 256, nbytes, dtype=np.uint8)
    buffer = native.Buffer(arena, [(skew, nbytes)], nbytes)
    buffer.copy_from(content)
    assert np.array_equal(buffer.array(), content)
    assert not arena.view(skew + nbytes).any()
    assert not arena.view(0, skew).any()


def test_tables() -> None:
    crcs, doubles = native.CrcTable(3), native.DoubleTable(2)
    assert (len(crcs), len(doubles)) == (3, 2)
    view = crcs.array()
    assert view.dtype == np.uint32
    assert doubles.array().dtype == np.float64
    view[1] = 5
    del crcs
    gc.collect()
    assert view.tolist() == [0, 5, 0]
