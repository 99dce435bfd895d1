"""The files that a run trains on. Imports no torch."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tierstore.config import as_dict, check_least, key
from tierstore.errors import ConfigError, DataError
from tierstore.units import is_unicode

#: Settings of tokenised documents, recorded in a run's conditions only if they are set.
_DOCUMENTS = frozenset({"format", "column", "separator", "packing"})
#: Settings that do not affect any bit.
_UNCONDITIONAL = frozenset({"micro_order"})
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class DataFormat(Enum):
    """The format of the files. BYTES takes every byte as a token; the others are tokenised with the model's tokenizer.

    AUTO: for a model without a tokenizer BYTES, refusing files that need a tokenizer; otherwise by ``FORMATS``, file by
    file.
    """

    AUTO = "auto"
    BYTES = "bytes"
    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"


#: AUTO's format by file extension. Other files are TEXT, except ``.json``, which is ambiguous.
FORMATS = {".jsonl": DataFormat.JSONL, ".ndjson": DataFormat.JSONL, ".parquet": DataFormat.PARQUET}


class Packing(Enum):
    """How documents fill sequences (``tierstore.train.tokens.data``).

    DOCUMENTS: several a sequence; no token sees another document. CONCATENATE: one long string, cut evenly; tokens see
    the documents before theirs. SEPARATE: one document a sequence, the rest padding. AUTO: DOCUMENTS if the model can
    keep documents apart, otherwise SEPARATE.
    """

    AUTO = "auto"
    DOCUMENTS = "documents"
    CONCATENATE = "concatenate"
    SEPARATE = "separate"


class MicroOrder(Enum):
    """The order in which a step's micro-batches pass the layers. The bits are the same.

    MICRO: each micro-batch passes all layers, forward and backward, before the next one begins. LAYER: each layer takes
    all micro-batches before the next layer does, so one fetch of an expert serves all of them; block inputs are kept
    meanwhile, and the backward pass recomputes blocks. AUTO: the choice of ``tierstore.plan.choose_order`` before a run;
    a session opened with AUTO uses MICRO.
    """

    AUTO = "auto"
    MICRO = "micro"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Files and how to read them: a run's data, or one task's. Raises ConfigError naming the field.

    A file is taken whatever its name; of a directory, the files whose names end in one of ``suffixes`` (empty: all).
    """

    paths: tuple[str, ...] = key((), "text files and directories (empty: Python's own source)")
    suffixes: tuple[str, ...] = key((), "endings of files taken from directories (empty: all)")
    format: DataFormat = key(DataFormat.AUTO, "format; bytes are not tokenised")
    column: str = key("", "JSONL field or Parquet column of texts or chats (empty: messages, else text)")
    separator: str = key("", "text between documents of a file (empty: one document a file)")
    packing: Packing = key(Packing.AUTO, "how documents share a sequence")

    def __post_init__(self) -> None:
        for name in ("column", "separator"):
            if not is_unicode(getattr(self, name)):
                raise ConfigError(f"{name}: expected text in UTF-8, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """What to train on. Raises ConfigError naming the field. No ``paths``: the source of Python's standard library
    (``*.py``, without site-packages and tests).
    """

    validation_fraction: float = key(0.05, "fraction held out for validation")
    max_bytes: int = key(64 << 20, "most bytes to read, if bytes are the tokens")
    batch_size: int = key(16, "sequences in a step, over all ranks")
    micro_batches: int = key(1, "micro-batches whose gradients a step sums")
    micro_order: MicroOrder = key(
        MicroOrder.AUTO,
        "micro: each micro-batch passes all layers; layer: each layer takes all micro-batches",
    )
    seed: int = key(0, "seed of the order of the text")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "max_bytes", "batch_size", "micro_batches")
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(
                f"validation_fraction: expected more than 0 and less than 1, got {self.validation_fraction}"
            )

    @property
    def layer_major(self) -> bool:
        """Whether each layer takes all micro-batches of a step at once; False for a single micro-batch, where the orders
        agree."""
        return self.micro_order is MicroOrder.LAYER and self.micro_batches > 1

    @property
    def passes(self) -> int:
        """The number of passes through the layers in a step."""
        return 1 if self.layer_major else self.micro_batches

    def conditions(self) -> dict[str, object]:
        """The settings that the bits of a run depend on, as JSON; those of tokenised documents only if they are set."""
        settings, defaults = as_dict(self), as_dict(DataConfig())
        return {
            name: value
            for name, value in settings.items()
            if name not in _UNCONDITIONAL and (name not in _DOCUMENTS or value != defaults[name])
        }


def text_files(config: DataConfig) -> list[Path]:
    """The files of ``config``, in order. Raises DataError naming a path that is missing or contains no files."""
    if not config.paths:
        root = Path(sysconfig.get_path("stdlib"))
        return _regular(_walk(root, (".py",), skipped=_SKIPPED))
    files: list[Path] = []
    for text in config.paths:
        path = Path(text)
        if path.is_dir():
            files += _walk(path, config.suffixes, skipped=frozenset())
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path}: expected a text file or a directory of them, found nothing there")
    return _regular(files)


def byte_files(config: DataConfig) -> list[Path]:
    """The files of ``config`` for bytes as tokens. Raises DataError naming a file that needs a tokenizer, unless the
    configuration says bytes.
    """
    files = text_files(config)
    for path in files:
        if config.format is DataFormat.AUTO and path.suffix.lower() in (*FORMATS, ".json"):
            raise DataError(
                f"{path}: {path.suffix} is read with the model's tokenizer, and this model has none (tokenizer.json); "
                'format = "bytes" takes every byte as a token'
            )
    return files


def text_bytes(config: DataConfig, tokenizer: Path | None = None) -> int:
    """Bytes of text that a run holds in memory: 0 for tokenised documents, whose tokens are mapped. Raises DataError."""
    if tokenizer is not None and config.format is not DataFormat.BYTES:
        return 0
    return min(config.max_bytes, sum(path.stat().st_size for path in text_files(config)))


def _regular(files: list[Path]) -> list[Path]:
    for path in files:
        # Opening a pipe would wait for its writer.
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: expected a text file, found a pipe, a socket or a device")
    return files


def _walk(root: Path, suffixes: tuple[str, ...], *, skipped: frozenset[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    found: list[Path] = []
    for directory, names, files in os.walk(root, onerror=refuse):
        names[:] = [name for name in names if name not in skipped]
        found += [Path(directory, name) for name in files if not suffixes or name.endswith(suffixes)]
    if not found:
        wanted = f" ending in {', '.join(suffixes)}" if suffixes else ""
        raise DataError(f"{root}: expected files{wanted}, found none")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
