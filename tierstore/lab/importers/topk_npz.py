"""Arrays of expert ids in an ``.npz``: ``topk`` [tokens, layers, k], and optionally ``prompt_len`` [prompts]."""

from __future__ import annotations

import enum
import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.config import check_least
from tierstore.errors import ConfigError, DataError
from tierstore.lab.importers import DEFAULT_WINDOW_LOG, SourceOptions, open_source
from tierstore.lab.routing import (
    Passes,
    Sections,
    decoded_sequences,
    expert_masks,
    expert_requesters,
    expert_table,
    routing_events,
    step_blocks,
)
from tierstore.trace.format import EventColumns, RecordTable

_MAX_EXPERTS = 1 << 20


class TopkRegime(enum.Enum):
    """Whether the tokens are taken as decoded or as trained on."""

    DECODE = "decode"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class TopkOptions(SourceOptions):
    """How tokens become steps."""

    regime: TopkRegime = field(
        default=TopkRegime.DECODE, metadata={"help": "decode: one token a sequence; train"}
    )
    sequences: int = field(default=1, metadata={"help": "prompts decoded side by side"})
    tokens_per_step: int = field(default=512, metadata={"help": "tokens of a training step"})
    experts: int = field(default=0, metadata={"help": "experts of a layer (0: the highest id plus one)"})
    sections: Sections = field(
        default=Sections.WHOLE, metadata={"help": "records as one group, or weights and moments (split)"}
    )
    weight_bytes: int = field(
        default=1, metadata={"help": "bytes of a record's weights, which are one frame", "size": True}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "sequences", "tokens_per_step")
        if not 0 <= self.experts <= _MAX_EXPERTS:
            raise ConfigError(f"experts: expected 0 to {_MAX_EXPERTS}, got {self.experts}")


def load_topk(
    path: Path, window_log: int = DEFAULT_WINDOW_LOG
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """``topk`` [tokens, layers, k] and ``prompt_len`` [prompts] (one prompt, where the file says nothing).

    Raises DataError naming the array and what was expected; OSError.
    """
    with open_source(path, window_log) as file:
        content = file.read()
    try:
        arrays = np.load(io.BytesIO(content), allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("found a single array")
        with arrays:
            found = {name: np.asarray(arrays[name]) for name in ("topk", "prompt_len") if name in arrays}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DataError(f"{path}: expected an .npz of plain arrays: {error}") from error
    if "topk" not in found:
        raise DataError(f"{path}: expected an array topk [tokens, layers, k], found none of that name")
    topk = found["topk"]
    if topk.ndim != 3 or topk.dtype.kind not in "iu" or 0 in topk.shape:
        raise DataError(
            f"{path}: topk: expected integers [tokens, layers, k], found {topk.dtype} {list(topk.shape)}"
        )
    if int(topk.min()) < 0 or int(topk.max()) >= _MAX_EXPERTS:
        token, layer, _ = (int(place[0]) for place in np.nonzero((topk < 0) | (topk >= _MAX_EXPERTS)))
        raise DataError(
            f"{path}: topk: token {token}, layer {layer}: expected expert ids from 0 to {_MAX_EXPERTS - 1}"
        )
    lengths = found.get("prompt_len", np.array([len(topk)]))
    if (
        lengths.ndim != 1
        or lengths.dtype.kind not in "iu"
        or (lengths < 0).any()
        or int(lengths.sum()) != len(topk)
    ):
        raise DataError(
            f"{path}: prompt_len: expected lengths [prompts] that sum to {len(topk)} tokens, "
            f"found {lengths.dtype} {list(lengths.shape)}, sum {lengths.sum()}"
        )
    return topk, lengths.astype(np.int64)


class TopkImporter:
    """Reads ``topk`` as decoding or as training."""

    def __init__(self, path: Path, options: TopkOptions) -> None:
        self._path = path
        self._options = options
        self._layers = self._experts = 0

    def chunks(self) -> Iterator[EventColumns]:
        topk, prompt_len = load_topk(self._path, self._options.window_log)
        options = self._options
        highest = int(topk.max())
        if options.experts and highest >= options.experts:
            raise DataError(f"{self._path}: topk: expert {highest}, but option experts is {options.experts}")
        self._layers, self._experts = topk.shape[1], options.experts or highest + 1
        passes, numbers = Passes.FORWARD, None
        if options.regime is TopkRegime.TRAIN:
            passes = Passes.FORWARD_BACKWARD
            steps = len(topk) // options.tokens_per_step
            if steps == 0:
                raise DataError(
                    f"{self._path}: topk: {len(topk)} tokens are less than a step of {options.tokens_per_step}"
                )
            tokens = np.arange(steps * options.tokens_per_step).reshape(steps, -1)
        else:
            if options.sequences > int((prompt_len > 0).sum()):
                raise DataError(
                    f"{self._path}: prompt_len: {len(prompt_len)} prompts cannot fill {options.sequences} sequences"
                )
            tokens, numbers = decoded_sequences(prompt_len, options.sequences)
        for first, block in step_blocks(tokens, self._layers, self._experts, topk.shape[2]):
            if numbers is None:
                requesters, masks = None, expert_masks(topk, block, self._experts)
            else:
                requesters = expert_requesters(
                    topk, block, numbers[first : first + len(block)], self._experts
                )
                masks = requesters > 0
            yield routing_events(
                masks, first_step=first, passes=passes, sections=options.sections, requesters=requesters
            )

    def table(self) -> RecordTable:
        return expert_table(
            np.repeat(np.arange(self._layers), self._experts),
            sections=self._options.sections,
            weight_bytes=self._options.weight_bytes,
        )

    def names(self) -> Iterator[str]:
        for layer in range(self._layers):
            for expert in range(self._experts):
                yield f"{layer}.{expert}"

    def columns(self) -> Mapping[str, str]:
        return {"experts": "array topk", "sequences": "array prompt_len"}
