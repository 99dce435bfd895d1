"""A stored model for inference only, and windows of tokens for it.

Shapes: B or W windows, T tokens of each, V vocabulary.

As under ``tierstore serve``, its experts are read from their tiers within a budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from tierstore.errors import DataError
from tierstore.hf.model import HfModel
from tierstore.machine import MemoryAccount
from tierstore.moe.seeds import derive_seed
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts import ServingPhase
from tierstore.serve.footprint import pass_account
from tierstore.serve.opening import ServedParts, open_served
from tierstore.tiers.slots import DeviceKind
from tierstore.train.files import DataConfig, byte_files, text_files
from tierstore.train.tokens.documents import Chat, documents
from tierstore.train.tokens.tokenizing import DocumentTokenizer


class Teacher:
    """An open model; ``open_teacher`` makes it. One thread at a time."""

    def __init__(self, parts: ServedParts) -> None:
        self.parts = parts
        self.model = cast(HfModel, parts.model)

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V), in the compute type. Raises ChecksumError, OSError."""
        self.parts.experts.begin(ServingPhase.PREFILL, tokens_BT.numel())
        self.model.begin_forward()
        logits: Tensor = self.model.module(input_ids=tokens_BT, use_cache=False).logits
        return logits

    def account(self, rows: int, length: int) -> MemoryAccount:
        """What the process will hold in passes over ``rows`` windows of ``length`` tokens."""
        config, spec, process = self.parts.config, self.parts.spec, self.parts.process
        return pass_account(config, spec, DeviceKind.CPU, process=process, tokens=rows * length)


@contextlib.contextmanager
def open_teacher(store: Path, *, host_budget: int, threads: int = 0) -> Iterator[Teacher]:
    """The model that was imported into ``store``, of one rank, on the CPU; its experts take ``host_budget`` bytes.

    Raises StoreMissingError, StoreError, BudgetError, OSError.
    """
    config = ServeConfig(
        store=store,
        device="cpu",
        host_budget=host_budget,
        threads=threads,
        prefetch=PrefetchConfig(predictor=PredictorName.ALL),
    )
    with open_served(config) as parts:
        yield Teacher(parts)


#: One window in this many, the last, is held out.
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
            turn, place = divmod(position, count)
            generator = torch.Generator().manual_seed(derive_seed("windows", seed, turn))
            chosen.append(int(torch.randperm(count, generator=generator)[place]))
        return self.train[chosen]


def read_windows(paths: Sequence[Path], tokenizer: Path | None, *, length: int, held_out: int) -> Windows:
    """The windows of ``length`` tokens of the files ``paths`` one after another, at most ``held_out`` of them held out.

    ``tokenizer``: the directory of the model's tokenizer, used as in training; None reads bytes. Raises
    DataError naming the file, ConfigError, OSError.
    """
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path}: expected a text file, found a directory")
    config = DataConfig(paths=tuple(map(str, paths)))
    if tokenizer is None:
        content = b"\n\n".join(path.read_bytes() for path in byte_files(config))
        tokens = torch.tensor(list(content), dtype=torch.long)
    else:
        tokens = _tokens(config, DocumentTokenizer(tokenizer))
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


def _tokens(config: DataConfig, tokenizer: DocumentTokenizer) -> Tensor:
    """The tokens of all documents, with an empty line between them."""
    texts: list[str] = []
    for path in text_files(config):
        for one in documents(path, config, lambda nbytes: None):
            if texts and (isinstance(one, Chat) or one.begins):
                texts.append("\n\n")
            texts.append(tokenizer.rendered([one])[0][0] if isinstance(one, Chat) else one.text)
    return torch.from_numpy(tokenizer.texts(["".join(texts)])[0].astype(np.int64))
