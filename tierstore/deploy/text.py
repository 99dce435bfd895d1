"""Windows of tokens to calibrate, distil and judge with.

Shapes: W windows, T tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierstore.capabilities import package_path
from tierstore.errors import DataError
from tierstore.hf.packages import quiet_transformers
from tierstore.moe.seeds import derive_seed

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

    ``tokenizer``: the directory of the model's; None reads bytes. Raises DataError naming the file, OSError.
    """
    texts = []
    for path in paths:
        try:
            texts.append(path.read_bytes().decode(errors="replace"))
        except IsADirectoryError as error:
            raise DataError(f"{path}: expected a text file, found a directory") from error
    tokens = _tokens("\n\n".join(texts), tokenizer)
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


def _tokens(text: str, tokenizer: Path | None) -> Tensor:
    if tokenizer is None:
        return torch.tensor(list(text.encode()), dtype=torch.long)
    with quiet_transformers(), package_path(tokenizer) as path:
        from transformers import AutoTokenizer

        made: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return torch.tensor(made(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
