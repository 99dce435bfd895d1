"""Packing: examples by hand, and properties of every packing."""

from pathlib import Path

import numpy as np
import pytest
from effort import share
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refuses

from tierstore.errors import DataError
from tierstore.train.files import Packing
from tierstore.train.tokens.data import HeldOut, Packed, Sequences, _best_fit, pack
from tierstore.train.tokens.token_files import TokenFiles, TokenWriter


def _files(directory: Path, documents: list[list[int]], counted: list[list[int]] | None = None) -> TokenFiles:
    with TokenWriter(directory / "partial", vocabulary=100, pad=0) as writer:
        for number, document in enumerate(documents):
            mask = None if counted is None else np.array(counted[number], dtype=np.uint8)
            writer.add(np.array(document, dtype=np.uint32), mask)
            writer.end_document()
        writer.finish(directory / "made", {})
    return TokenFiles(directory / "made")


def _rows(split: Sequences) -> list[list[tuple[int, int]]]:
    """Each sequence's chunks: first token and positions."""
    chunks = list(zip(split.starts.tolist(), split.lengths.tolist(), strict=True))
    return [chunks[split.first[i] : split.first[i + 1]] for i in range(len(split))]


def test_best_fit_by_hand() -> None:
    # longest first: 7 | 5 | 4 joins the 5 (which has as much space as it needs) | 3 joins the 7 | 3 | 2 joins the last
    assert _best_fit(np.array([3, 7, 4, 5, 3, 2]), 10).tolist() == [0, 0, 1, 1, 2, 2]


def test_documents_by_hand(tmp_path: Path) -> None:
    # 11 tokens have 10 positions: chunks of 4, 4 and 2. 3 tokens have 2, 1 has none, 4 have 3, 2 have 1.
    files = _files(tmp_path, [list(range(11)), [1] * 3, [2], [3] * 4, [4] * 2])
    packed = pack(files, Packing.DOCUMENTS, seq_len=4, fraction=0.17, where="here")
    # 6 chunks at 0, 4, 8, 11, 15 and 19; of so few documents chunks are held out, and the sixth crosses 6 * .17 > 1
    assert packed.held_out is HeldOut.CHUNKS
    assert _rows(packed.validation) == [[(19, 1)]]
    assert _rows(packed.train) == [[(0, 4)], [(4, 4)], [(8, 2), (11, 2)], [(15, 3)]]
    assert packed.train.counted.tolist() == [4, 4, 4, 3]


def test_separate_and_joined_by_hand(tmp_path: Path) -> None:
    files = _files(tmp_path, [list(range(11)), [1] * 3, [2], [3] * 4, [4] * 2])
    packed = pack(files, Packing.SEPARATE, seq_len=4, fraction=0.17, where="here")
    assert _rows(packed.train) == [[(0, 4)], [(4, 4)], [(8, 2)], [(11, 2)], [(15, 3)]]
    # 21 tokens have 20 positions: 5 full sequences, and their targets are the tokens behind them
    joined = pack(files, Packing.CONCATENATE, seq_len=4, fraction=0.25, where="here")
    assert _rows(joined.train) == [[(0, 4)], [(4, 4)], [(8, 4)], [(16, 4)]]
    assert _rows(joined.validation) == [[(12, 4)]]


def test_what_no_answer_is_in_is_left_out(tmp_path: Path) -> None:
    counted = [[0] * 8 + [1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 1, 1, 0]]
    files = _files(tmp_path, [[7] * 10, [7] * 3, [7] * 3, [7] * 5], counted)
    packed = pack(files, Packing.SEPARATE, seq_len=4, fraction=0.01, where="here")
    # of the first document's chunks (4, 4 and 1 positions) the second has the target at 8, the third the one at 9; the
    # second document's only counted token is its first, which nothing predicts
    rows = _rows(packed.train) + _rows(packed.validation)
    assert rows == [[(4, 4)], [(8, 1)], [(13, 2)], [(16, 4)]]
    assert packed.train.counted.tolist() + packed.validation.counted.tolist() == [1, 1, 2, 2]


def test_too_little_is_refused(tmp_path: Path) -> None:
    files = _files(tmp_path, [[1, 2, 3]])
    with refuses(DataError, "here:", "3 tokens", "at least 2"):
        pack(files, Packing.DOCUMENTS, seq_len=4, fraction=0.05, where="here")


@settings(max_examples=share(150))
@given(
    sizes=st.lists(st.integers(0, 40), min_size=2, max_size=60),
    seq_len=st.integers(1, 17),
    fraction=st.sampled_from([0.02, 0.2, 0.5]),
    packing=st.sampled_from([Packing.DOCUMENTS, Packing.SEPARATE]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_packing(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    seq_len: int,
    fraction: float,
    packing: Packing,
    masked: bool,
    seed: int,
) -> None:
    """Every target is in one sequence once; none is too long; counts are those of a plain walk; a document that fits is
    whole; and a document is in one split, where documents are held out.
    """
    random = np.random.default_rng(seed)
    documents = [random.integers(0, 100, size).tolist() for size in sizes]
    masks = [(random.random(size) < 0.4).astype(int).tolist() for size in sizes]
    files = _files(tmp_path_factory.mktemp("files"), documents, masks if masked else None)
    try:
        packed = pack(files, packing, seq_len=seq_len, fraction=fraction, where="here")
    except DataError:
        assume(False)
        raise
    owner = np.repeat(np.arange(len(sizes)), sizes)
    mask = np.concatenate(masks) if masked else np.ones(owner.size)
    seen: list[int] = []
    for split in (packed.train, packed.validation):
        for row, counted in zip(_rows(split), split.counted, strict=True):
            targets = [start + 1 + i for start, length in row for i in range(length)]
            assert len(targets) <= seq_len
            assert counted == mask[targets].sum() > 0
            for start, length in row:
                assert len(set(owner[start : start + length + 1])) == 1
            seen += targets
    assert len(seen) == len(set(seen))
    first = np.cumsum([0, *sizes])[:-1]
    missing = set(range(owner.size)) - set(seen) - set(first.tolist())
    assert not mask[sorted(missing)].any()
    _check_whole(packed, sizes, seq_len)
    if packed.held_out is HeldOut.DOCUMENTS:
        assert not set(owner[packed.train.starts]) & set(owner[packed.validation.starts])


def _check_whole(packed: Packed, sizes: list[int], seq_len: int) -> None:
    """A document that fits in a sequence is one chunk of it; the others are cut at whole sequences."""
    ends = np.cumsum([0, *sizes])
    for split in (packed.train, packed.validation):
        for start, length in zip(split.starts, split.lengths, strict=True):
            document = int(np.searchsorted(ends, start, side="right")) - 1
            assert (start - ends[document]) % seq_len == 0
            assert length == min(seq_len, ends[document + 1] - 1 - start)


@settings(max_examples=share(80))
@given(st.lists(st.integers(1, 12), min_size=1, max_size=50), st.integers(12, 30))
def test_best_fit_decreasing(lengths: list[int], seq_len: int) -> None:
    """The same as the slow way to say it; and no two sequences would fit in one."""
    spaces: list[int] = []
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in order:
        fitting = [space for space in spaces if space >= lengths[i]]
        if fitting:
            spaces[spaces.index(min(fitting))] -= lengths[i]
        else:
            spaces.append(seq_len - lengths[i])
    found = _best_fit(np.array(lengths), seq_len)
    sums = np.bincount(found, weights=lengths)
    assert sorted(sums) == sorted(seq_len - np.array(spaces))
    assert len(sums) == 1 or sum(sorted(sums)[:2]) > seq_len
