"""Batches of tokenised documents: the documents and their order are a function of the configuration and the step.

An epoch visits each sequence of the training split once, in the order of a permutation keyed by (seed, epoch)
(``tierstore.train.data.permute``), so that a run resumes from the step alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tierstore.errors import ConfigError, DataError
from tierstore.machine import return_freed_memory
from tierstore.model.interface import IGNORED, Batch
from tierstore.moe.seeds import derive_seed
from tierstore.stats import OnProgress, no_progress
from tierstore.train.data import TextData, permute
from tierstore.train.files import DataConfig, DataFormat, Packing, text_files
from tierstore.train.tokens.making import check_vocabulary, find_tokens, tokenise
from tierstore.train.tokens.token_files import Offsets, TokenFiles
from tierstore.train.tokens.tokenizing import DocumentTokenizer


class TokenData:
    """The two splits of tokenised documents. ``crc32`` covers every token and the packing."""

    def __init__(
        self,
        config: DataConfig,
        files: TokenFiles,
        packing: Packing,
        *,
        seq_len: int,
        tokenizer: Path,
        note: str = "",
    ) -> None:
        """``packing`` is not AUTO. ``note`` is appended to ``describe``'s line. Raises DataError for too few tokens."""
        if seq_len < 1:
            raise ConfigError(f"seq_len: expected at least 1, got {seq_len}")
        self.config = config
        self.files = files
        self.packing = packing
        self.seq_len = seq_len
        self.packed = pack(
            files,
            packing,
            seq_len=seq_len,
            fraction=config.validation_fraction,
            where=config.paths[0] if len(config.paths) == 1 else f"{len(config.paths)} paths",
        )
        self.crc32 = _checksum(files, self.packed.train, self.packed.validation)
        self._tokenizer_directory = tokenizer
        self._tokenizer: DocumentTokenizer | None = None
        self._note = note
        self._step: tuple[int, list[int]] = (-1, [])

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Micro-batch ``micro`` of step ``step``: a function of (seed, step, micro)."""
        config = self.config
        if not 0 <= micro < config.micro_batches:
            raise ValueError(f"micro-batch {micro} of {config.micro_batches}")
        rows = self._rows(step)
        train, first = self.packed.train, micro * config.batch_size
        counted = int(train.counted[rows].sum(dtype=np.int64))
        return self._cut(
            train, rows[first : first + config.batch_size], step_targets=counted, parts=config.micro_batches
        )

    def _rows(self, step: int) -> list[int]:
        """The sequences of a step."""
        if self._step[0] != step:
            size = self.config.micro_batches * self.config.batch_size
            self._step = (step, self._sequences(range(step * size, (step + 1) * size)))
        return self._step[1]

    def _sequences(self, numbers: Sequence[int]) -> list[int]:
        """The sequences at positions ``numbers`` in the order of all epochs."""
        rows, count = [], len(self.packed.train)
        for number in numbers:
            epoch, place = divmod(number, count)
            rows.append(permute(place, count, derive_seed(self.config.seed, "data", epoch)))
        return rows

    @property
    def examples(self) -> int:
        """Sequences in an epoch."""
        return len(self.packed.train)

    def take(self, numbers: Sequence[int]) -> Batch:
        """The sequences at positions ``numbers`` in the order of all epochs, one a row."""
        return self._cut(self.packed.train, self._sequences(numbers), step_targets=0, parts=1)

    def targets(self, numbers: Sequence[int]) -> int:
        """The number of their counted targets."""
        return int(self.packed.train.counted[self._sequences(numbers)].sum(dtype=np.int64))

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """``count`` batches, spread evenly over the validation split: the same ones every time.

        Fewer if the split has fewer sequences: each at most once. An incomplete last batch is filled up with rows without
        a counted target, so that ranks share it evenly; for joined documents, whose targets all count, its rows are left
        out.
        """
        validation, size = self.packed.validation, self.config.batch_size
        wanted = min(len(validation), count * size)
        if wanted > size and self._all_count:
            wanted -= wanted % size
        rows: list[int | None] = [i * len(validation) // wanted for i in range(wanted)]
        if not self._all_count:
            rows += [None] * (-wanted % size)
        for i in range(0, len(rows), size):
            chosen = rows[i : i + size]
            counted = sum(int(validation.counted[row]) for row in chosen if row is not None)
            yield self._cut(validation, chosen, step_targets=counted, parts=1)

    @property
    def _all_count(self) -> bool:
        return self.packing is Packing.CONCATENATE and self.files.counted is None

    def _cut(self, split: Sequences, rows: Sequence[int | None], *, step_targets: int, parts: int) -> Batch:
        shape = (len(rows), self.seq_len)
        tokens = np.full(shape, self.files.index.pad, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.tile(np.arange(self.seq_len), (len(rows), 1))
        mask = np.zeros(shape, dtype=np.bool_)
        for row, sequence in enumerate(rows):
            if sequence is None:
                continue
            at = 0
            for chunk in range(split.first[sequence], split.first[sequence + 1]):
                start, length = int(split.starts[chunk]), int(split.lengths[chunk])
                span = self.files.tokens[start : start + length + 1].astype(np.int64)
                tokens[row, at : at + length] = span[:-1]
                targets[row, at : at + length] = span[1:]
                if self.files.counted is not None:
                    left_out = self.files.counted[start + 1 : start + length + 1] == 0
                    targets[row, at : at + length][left_out] = IGNORED
                positions[row, at:] -= positions[row, at]
                at += length
            mask[row, :at] = True
            if at < self.seq_len:
                positions[row, at:] -= positions[row, at]
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            torch.from_numpy(positions) if self.packing is Packing.DOCUMENTS else None,
            step_targets=0 if self._all_count else step_targets,
            parts=parts,
            mask_BT=None if mask.all() else torch.from_numpy(mask),
        )

    def describe(self) -> str:
        """One line for the head of a run."""
        index, train, validation = self.files.index, self.packed.train, self.packed.validation
        formats = ", ".join(f"{count} {name}" for name, count in sorted(index.formats.items()))
        padding = 1 - train.positions / (len(train) * self.seq_len)
        text = (
            f"{index.tokens} tokens, {index.documents} documents ({formats}) in {len(train)} sequences of {self.seq_len} to"
            f" train on, {len(validation)} to validate ({self.packed.held_out.value} held out); {_PACKED[self.packing]},"
            f" {padding:.1%} padding"
        )
        text += "".join(f"; {count} {why} left out" for why, count in sorted(index.skipped.items()))
        return text + (f"; {self._note}" if self._note else "")

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return self._loaded().encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``."""
        return self._loaded().decode(tokens)

    def _loaded(self) -> DocumentTokenizer:
        if self._tokenizer is None:
            self._tokenizer = DocumentTokenizer(self._tokenizer_directory)
        return self._tokenizer


_PACKED = {
    Packing.DOCUMENTS: "documents packed, none sees another",
    Packing.CONCATENATE: "documents joined, tokens see the ones before theirs",
    Packing.SEPARATE: "one document a sequence",
}


def _checksum(files: TokenFiles, *splits: Sequences) -> int:
    crc = files.index.crc32
    arrays: list[npt.NDArray[np.int64]] = []
    for split in splits:
        arrays += [split.starts, split.lengths.astype(np.int64), split.first]
    for array in arrays:
        crc = zlib.crc32(array.astype("<i8").tobytes(), crc)
    return crc


# Packing documents into sequences of S positions ------------------------------------------------------------
#
# The tokens of each sequence are known before any is read.
#
# A document of n tokens has n - 1 positions: its last token is only a target. Positions are cut into chunks of S: full
# chunks are sequences by themselves, and the rest of a document is shorter. **DOCUMENTS** packs these rests by best-fit
# decreasing (longest first, each into the fullest sequence that still has space; Johnson 1973), so that no document that
# fits is cut, and there is little padding. **SEPARATE** gives each chunk its own sequence. **CONCATENATE** takes all
# documents as one string, cut every S positions, without its incomplete end. Chunks without a counted target are left
# out.
#
# Validation gets each item at which the fraction crosses a whole number: documents if there are enough, otherwise chunks.


_ENOUGH = 8  # fewest held-out documents for holding out whole documents
Lengths = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]


class HeldOut(Enum):
    """The items held out for validation."""

    DOCUMENTS = "documents"
    CHUNKS = "chunks of documents"


@dataclass(frozen=True)
class Sequences:
    """Chunks in the order of their sequences: sequence i has chunks ``first[i]`` to ``first[i + 1]``.

    ``starts``: a chunk's first token, among all tokens; ``lengths``: its positions; ``counted``: a sequence's counted
    targets.
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
    documents, starts, lengths = _chunks_of(ends, seq_len)
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
            _best_fit(lengths[chosen], seq_len) if packing is Packing.DOCUMENTS else np.arange(chosen.sum())
        )
        splits.append(_in_order(starts[chosen], lengths[chosen], counted[chosen], order))
    return Packed(splits[0], splits[1], held_out)


def _chunks_of(ends: Offsets, seq_len: int) -> tuple[Places, Offsets, Lengths]:
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


def _best_fit(lengths: Sequence[int] | Lengths, seq_len: int) -> Places:
    """The sequence of each chunk, by best-fit decreasing. Ties: of equal chunks the first, of equally full sequences the
    one that became so last.
    """
    lengths = np.asarray(lengths, dtype=np.int32)
    sequence_of = np.empty(lengths.size, dtype=np.int64)
    waiting: dict[int, list[int]] = {}  # sequences by their remaining positions
    spaces = 0  # bit r: some sequence has r positions left
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


def _in_order(starts: Offsets, lengths: Lengths, counted: Lengths, sequence_of: Places) -> Sequences:
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


# Opening a run's data ---------------------------------------------------------------------------------------


def open_data(
    config: DataConfig,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: Path | None,
    store: Path,
    together: str = "",
    first: bool = True,
    barrier: Callable[[], None] = lambda: None,
    progress: OnProgress = no_progress,
) -> TextData | TokenData:
    """Opens the training data of ``config``.

    ``tokenizer``: the directory with the tokenizer's files (None: bytes). ``store``: the job's directory, which keeps the
    tokens. ``together``: why this model cannot keep documents apart in a sequence (empty: it can). The ``first`` of
    several ranks tokenises, and all meet at ``barrier``. ``progress`` is called with the bytes tokenised and in all.

    Raises DataError, ConfigError, CapabilityError, StoreInUseError, OSError.
    """
    if tokenizer is None or config.format is DataFormat.BYTES:
        return _open_bytes(config, seq_len=seq_len)
    if config.max_bytes != DataConfig().max_bytes:
        raise ConfigError(
            "data.max_bytes: documents are tokenised whole; it limits text whose bytes are the tokens"
        )
    packing, note = _packing(config, together)
    files = text_files(config)
    if first:
        made = tokenise(store, files, config, tokenizer=tokenizer, vocabulary=vocab_size, progress=progress)
        return_freed_memory()  # the run takes the place of tokenising in the announced memory
        TokenFiles(made).verify()
    else:
        made = find_tokens(store, files, config, tokenizer=tokenizer)
    barrier()
    opened = TokenFiles(made)
    check_vocabulary(opened.index.vocabulary, vocab_size, tokenizer)
    return TokenData(config, opened, packing, seq_len=seq_len, tokenizer=tokenizer, note=note)


def _packing(config: DataConfig, together: str) -> tuple[Packing, str]:
    if config.packing is Packing.AUTO:
        return (Packing.SEPARATE, f"not packed: {together}") if together else (Packing.DOCUMENTS, "")
    if config.packing is Packing.DOCUMENTS and together:
        raise ConfigError(
            f"data.packing: documents cannot be packed: {together}; choose separate or concatenate"
        )
    return config.packing, ""


def _open_bytes(config: DataConfig, *, seq_len: int) -> TextData:
    if config.format not in (DataFormat.AUTO, DataFormat.BYTES):
        raise ConfigError(
            f"data.format: {config.format.value} needs a tokenizer, and the model has none; expected auto or bytes"
        )
    for name, default in (("column", ""), ("separator", ""), ("packing", Packing.AUTO)):
        if getattr(config, name) != default:
            raise ConfigError(f"data.{name}: it needs tokenised documents, but here every byte is a token")
    return TextData(config, seq_len=seq_len)
