"""crc32c: the RFC's vectors, a bitwise reference, and parts that make the whole."""

import numpy as np
import pytest
from child_process import run_python
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_crc32c import naive_crc32c

from tierstore import _native

quick = settings(max_examples=share(50))


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("function", [_native.crc32c, _native.crc32c_scalar])
@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, appendix B.4, and the check value of the catalogues
        (b"", 0),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_known_vectors(function, data, expected):
    assert function(array(data)) == expected


@quick
@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_equals_the_bitwise_reference(data, crc):
    assert (
        _native.crc32c(array(data), crc) == naive_crc32c(data, crc) == _native.crc32c_scalar(array(data), crc)
    )


@quick
@given(st.integers(0, 3000), st.integers(0, 64), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_wide_paths_equal_the_tables_at_every_length_and_alignment(size, offset, crc, seed):
    data = np.random.default_rng(seed).integers(0, 256, offset + size, dtype=np.uint8)[offset:]
    assert _native.crc32c(data, crc) == _native.crc32c_scalar(data, crc)


@quick
@given(st.integers(0, 3000), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_parts_make_the_whole(size, fraction, seed):
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    a, b = np.split(data, [int(fraction * size)])
    whole = _native.crc32c(data)
    assert _native.crc32c(b, _native.crc32c(a)) == whole
    assert _native.crc32c_combine(_native.crc32c(a), _native.crc32c(b), b.size) == whole


def test_combine_over_lengths_past_32_bits():
    def zeros(doublings: int) -> int:
        # The checksum of 2^doublings zero bytes: that of 2 n zeros is that of n combined with itself.
        crc = naive_crc32c(b"\0")
        for i in range(doublings):
            crc = _native.crc32c_combine(crc, crc, 2**i)
        return crc

    a = naive_crc32c(b"a")
    half = _native.crc32c_combine(a, zeros(39), 2**39)
    assert _native.crc32c_combine(half, zeros(39), 2**39) == _native.crc32c_combine(a, zeros(40), 2**40)


def test_other_dtypes_are_taken_as_bytes():
    values = np.arange(100, dtype=np.float32).reshape(10, 10)
    assert _native.crc32c(values) == _native.crc32c(values.view(np.uint8).ravel())


def test_what_is_not_contiguous_is_refused():
    with pytest.raises(TypeError):
        _native.crc32c(np.zeros(10, np.uint8)[::2])


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_each_method_gives_the_same(isa):
    if not _native.instruction_set_supported(_native.InstructionSet[isa.upper()]):
        pytest.skip(f"this machine lacks {isa}")
    program = (
        "import numpy as np; from tierstore import _native as n;"
        "print(n.instruction_set().name, n.crc32c(np.arange(99991, dtype=np.int64)))"
    )
    run = run_python(program, TIERSTORE_ISA=isa)
    assert run.stdout.split() == [isa.upper(), str(_native.crc32c_scalar(np.arange(99991, dtype=np.int64)))]


def test_an_unknown_instruction_set_is_refused():
    program = "from tierstore import _native as n; n.instruction_set()"
    run = run_python(program, status=1, TIERSTORE_ISA="neon")
    assert "TIERSTORE_ISA: expected scalar, avx2 or avx512, got neon" in run.stderr
