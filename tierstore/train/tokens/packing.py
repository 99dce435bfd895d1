"""How documents are laid into sequences of S positions: which tokens each sequence has, known before any is read.

A document of n tokens has n - 1 positions: its last token is only a target. Positions are cut into chunks of S: the full
ones are sequences by themselves, and what is left of a document is shorter. **DOCUMENTS** packs these by best-fit
decreasing (longest first, each into the fullest sequence that still has space; Johnson 1973), so that no document that
fits is cut, and little is padding. **SEPARATE** leaves each chunk alone. **CONCATENATE** takes all documents as one string,
cut every S positions; what is left at its end is left out. Chunks without a counted target are left out too.

Held out for validation is what the fraction crosses a whole number at: documents where there are enough, otherwise chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from tierstore.errors import DataError
from tierstore.train.files import Packing
from tierstore.train.tokens.token_files import Offsets, TokenFiles

_ENOUGH = 8  # documents to hold out, for documents to be what is held out
Lengths = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]


class HeldOut(Enum):
    """What validation is made of."""

    DOCUMENTS = "documents"
    CHUNKS = "chunks of documents"


@dataclass(frozen=True)
class Sequences:
    """Chunks in the order of their sequences: sequence i has chunks ``first[i]`` to ``first[i + 1]``.

    ``starts``: a chunk's first token, of all tokens; ``lengths``: its positions; ``counted``: a sequence's counted targets.
    """

    starts: Offsets
    lengths: Lengths
    first: Places
    counted: Lengths

    def __len__(self) -> int:
        return self.counted.size

    @property
    def positions(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


@dataclass(frozen=True)
class Packed:
    """The two splits."""

    train: Sequences
    validation: Sequences
    held_out: HeldOut


def pack(files: TokenFiles, packing: Packing, *, seq_len: int, fraction: float, where: str) -> Packed:
    """Every sequence of ``files``. Raises DataError naming ``where`` when a split would be empty."""
    joined = packing is Packing.CONCATENATE
    ends = np.array([0, files.index.tokens], dtype=np.int64) if joined else files.documents
    documents, starts, lengths = _chunks(ends, seq_len)
    counted = files.counted_targets(starts + 1, lengths)
    used = (counted > 0) & (lengths == seq_len) if joined else counted > 0
    documents, starts, lengths, counted = documents[used], starts[used], lengths[used], counted[used]
    numbers, item = np.unique(documents, return_inverse=True)
    held_out = HeldOut.DOCUMENTS
    if numbers.size * fraction < _ENOUGH:
        held_out, item = HeldOut.CHUNKS, np.arange(starts.size)
    kept = _held_out(int(item[-1]) + 1 if item.size else 0, fraction)
    if not kept.any() or kept.all():
        raise DataError(
            f"{where}: {files.index.tokens} tokens give {starts.size} sequences of up to {seq_len}; expected at least 2, to "
            "train on and to validate"
        )
    splits = []
    for chosen in (~kept[item], kept[item]):
        order = (
            _packed(lengths[chosen], seq_len) if packing is Packing.DOCUMENTS else _alone(int(chosen.sum()))
        )
        splits.append(_sequences(starts[chosen], lengths[chosen], counted[chosen], order))
    return Packed(splits[0], splits[1], held_out)


def _chunks(ends: Offsets, seq_len: int) -> tuple[Places, Offsets, Lengths]:
    """Each chunk's document, first token and positions, in the order of the tokens."""
    positions = np.maximum(np.diff(ends) - 1, 0)
    counts = -(-positions // seq_len)
    documents = np.repeat(np.arange(positions.size), counts)
    number = np.arange(documents.size) - np.repeat(np.cumsum(counts) - counts, counts)
    begun = number * seq_len
    lengths = np.minimum(positions[documents] - begun, seq_len).astype(np.int32)
    return documents, ends[documents] + begun, lengths


def _held_out(count: int, fraction: float) -> npt.NDArray[np.bool_]:
    places = np.arange(count + 1) * fraction + 1e-9
    kept = np.diff(places.astype(np.int64)) > 0
    if count > 1 and not kept.any():
        kept[-1] = True
    return kept


def _alone(count: int) -> Places:
    return np.arange(count)


def _packed(lengths: Sequence[int] | Lengths, seq_len: int) -> Places:
    """The sequence of each chunk, by best-fit decreasing. Of chunks as long the first comes first, of sequences as full the
    one that became so last.
    """
    lengths = np.asarray(lengths, dtype=np.int32)
    sequence_of = np.empty(lengths.size, dtype=np.int64)
    waiting: dict[int, list[int]] = {}  # sequences by the positions that they have left
    spaces = 0  # bit r: a sequence has r positions left
    opened = 0
    for chunk in np.argsort(-lengths, kind="stable"):
        length = int(lengths[chunk])
        enough = spaces >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1
            sequence = waiting[space].pop()
            if not waiting[space]:
                spaces &= ~(1 << space)
        else:
            space, sequence = seq_len, opened
            opened += 1
        sequence_of[chunk] = sequence
        if left := space - length:
            waiting.setdefault(left, []).append(sequence)
            spaces |= 1 << left
    return sequence_of


def _sequences(starts: Offsets, lengths: Lengths, counted: Lengths, sequence_of: Places) -> Sequences:
    """Sequences in the order of their first chunks, and chunks in the order of their tokens."""
    count = int(sequence_of.max()) + 1
    earliest = np.full(count, starts.size, dtype=np.int64)
    np.minimum.at(earliest, sequence_of, np.arange(starts.size))
    rank = np.empty(count, dtype=np.int64)
    rank[np.argsort(earliest, kind="stable")] = np.arange(count)
    place = rank[sequence_of]
    order = np.argsort(place, kind="stable")
    sizes = np.bincount(place, minlength=count)
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, place, counted)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Sequences(starts[order], lengths[order], first, sums.astype(np.int32))
