"""Windows of tokens to calibrate, distil and judge with.

Shapes: W windows, T tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tierstore.errors import DataError
from tierstore.moe.seeds import derive_seed
from tierstore.train.files import DataConfig, byte_files, text_files
from tierstore.train.tokens.documents import Chat, documents
from tierstore.train.tokens.tokenizing import DocumentTokenizer

#: Of so many windows the last is held out.
_EVERY = 16


@dataclass(frozen=True)
class Windows:
    """Windows of a text: ``train`` (W, T) in the order of the text, and those ``held`` out of it, spread over all of it."""

    train: Tensor
    held: Tensor

    def batch(self, step: int, rows: int, seed: int) -> Tensor:
        """The windows (rows, T) of step ``step``: every one once before any comes again, each time in another order."""
        count = len(self.train)
        chosen = []
        for position in range(step * rows, (step + 1) * rows):
            order = self._order(position // count, seed)
            chosen.append(int(order[position % count]))
        return self.train[chosen]

    def _order(self, turn: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed("windows", seed, turn))
        return torch.randperm(len(self.train), generator=generator)


def read_windows(paths: Sequence[Path], tokenizer: Path | None, *, length: int, held_out: int) -> Windows:
    """The windows of ``length`` tokens of the files ``paths`` one after another, at most ``held_out`` of them held out.

    ``tokenizer``: the directory of the model's, with which files are read as training reads them; None reads bytes. Raises
    DataError naming the file, ConfigError, OSError.
    """
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path}: expected a text file, found a directory")
    config = DataConfig(paths=tuple(map(str, paths)))
    tokens = _bytes(config) if tokenizer is None else _tokens(config, DocumentTokenizer(tokenizer))
    count = len(tokens) // length
    if count < 2:
        named = ", ".join(str(path) for path in paths)
        raise DataError(f"{named}: expected at least {2 * length} tokens (two windows), found {len(tokens)}")
    windows_WT = tokens[: count * length].view(count, length)
    every = min(_EVERY, count)
    held = torch.arange(count) % every == every - 1
    kept = windows_WT[held]
    spread = torch.linspace(0, len(kept) - 1, min(held_out, len(kept))).long()
    return Windows(windows_WT[~held], kept[spread])


def _bytes(config: DataConfig) -> Tensor:
    content = b"\n\n".join(path.read_bytes() for path in byte_files(config))
    return torch.tensor(list(content), dtype=torch.long)


def _tokens(config: DataConfig, tokenizer: DocumentTokenizer) -> Tensor:
    """Of all documents, with an empty line between them."""
    texts: list[str] = []
    for path in text_files(config):
        for one in documents(path, config, lambda nbytes: None):
            if texts and (isinstance(one, Chat) or one.begins):
                texts.append("\n\n")
            texts.append(tokenizer.rendered([one])[0][0] if isinstance(one, Chat) else one.text)
    return torch.from_numpy(tokenizer.texts(["".join(texts)])[0].astype(np.int64))
