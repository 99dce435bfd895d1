"""Batches of tokenised documents: which documents, in which order, all a function of the configuration and the step.

An epoch visits each sequence of the training split once, in the order of a permutation keyed by (seed, epoch)
(``tierstore.train.data.permute``), so that a run resumes from the step alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tierstore.errors import ConfigError
from tierstore.model.interface import IGNORED, Batch
from tierstore.moe.seeds import derive_seed
from tierstore.train.data import permute
from tierstore.train.files import DataConfig, Packing
from tierstore.train.tokens.packing import Sequences, pack
from tierstore.train.tokens.token_files import TokenFiles
from tierstore.train.tokens.tokenizing import DocumentTokenizer


class TokenData:
    """The two splits of tokenised documents. ``crc32`` covers every token and how documents are packed."""

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
        """``packing`` is not AUTO. ``note`` is added to what ``describe`` says. Raises DataError for too few tokens."""
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
        """The sequences that come at ``numbers`` in the order of all epochs."""
        rows, count = [], len(self.packed.train)
        for number in numbers:
            epoch, place = divmod(number, count)
            rows.append(permute(place, count, derive_seed(self.config.seed, "data", epoch)))
        return rows

    @property
    def examples(self) -> int:
        """How many sequences an epoch visits."""
        return len(self.packed.train)

    def take(self, numbers: Sequence[int]) -> Batch:
        """The sequences that come at ``numbers`` in the order of all epochs, one a row."""
        return self._cut(self.packed.train, self._sequences(numbers), step_targets=0, parts=1)

    def targets(self, numbers: Sequence[int]) -> int:
        """How many of their targets count."""
        return int(self.packed.train.counted[self._sequences(numbers)].sum(dtype=np.int64))

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """``count`` batches, spread evenly over the validation split: the same ones every time.

        Fewer if the split has fewer sequences: each at most once. Where these do not fill the last batch, rows without a
        counted target do, so that ranks share it evenly; joined documents, whose targets all count, leave out its rows.
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
