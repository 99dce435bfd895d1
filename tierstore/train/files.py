"""Which files a run trains on. Imports no torch."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tierstore.config import as_dict
from tierstore.errors import ConfigError, DataError
from tierstore.units import is_unicode

#: Settings of tokenised documents, which a run's conditions name only where they are set.
_DOCUMENTS = frozenset({"format", "column", "separator", "packing"})
#: Settings that no bit depends on.
_UNCONDITIONAL = frozenset({"micro_order"})
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class DataFormat(Enum):
    """What the files hold. BYTES takes every byte as a token; the others are tokenised with the model's tokenizer.

    AUTO: BYTES for a model without a tokenizer, which refuses files that need one; with a tokenizer by ``FORMATS``,
    file by file.
    """

    AUTO = "auto"
    BYTES = "bytes"
    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"


#: What AUTO reads files as by their names' ends; TEXT all others, but for ``.json``, which leaves two.
FORMATS = {".jsonl": DataFormat.JSONL, ".ndjson": DataFormat.JSONL, ".parquet": DataFormat.PARQUET}


class Packing(Enum):
    """How documents are laid into sequences (``tierstore.train.tokens.data``).

    DOCUMENTS: several a sequence, no token sees another document. CONCATENATE: one long string, cut evenly; tokens
    see the documents before theirs. SEPARATE: one document a sequence, the rest padding. AUTO: DOCUMENTS where the
    model keeps documents apart, otherwise SEPARATE.
    """

    AUTO = "auto"
    DOCUMENTS = "documents"
    CONCATENATE = "concatenate"
    SEPARATE = "separate"


class MicroOrder(Enum):
    """In which order a step of several micro-batches passes the layers. The bits are the same.

    MICRO: each micro-batch passes all layers, forward and backward, before the next one begins. LAYER: each layer takes
    all micro-batches before the next layer does, so one fetch of an expert serves all of them; block inputs are kept
    meanwhile, and blocks are computed again in the backward pass. AUTO: what ``tierstore.plan.choose_order`` makes of it
    before a run; a session that is opened with AUTO takes MICRO.
    """

    AUTO = "auto"
    MICRO = "micro"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Which files, and how they are read: of a run's data, or of one task's. Raises ConfigError naming the field.

    A file is taken whatever its name; a directory gives the files whose names end in one of ``suffixes`` (empty: all).
    """

    paths: tuple[str, ...] = field(
        default=(), metadata={"help": "text files and directories (none: Python's own source)"}
    )
    suffixes: tuple[str, ...] = field(
        default=(), metadata={"help": "endings of files taken from directories (empty: all)"}
    )
    format: DataFormat = field(
        default=DataFormat.AUTO,
        metadata={"help": "auto, bytes, or what is tokenised: text, jsonl, parquet"},
    )
    column: str = field(
        default="",
        metadata={
            "help": "field of JSONL, column of Parquet: a text or a chat (empty: messages, or else text)"
        },
    )
    separator: str = field(
        default="", metadata={"help": "what separates the documents of a text file (empty: a file is one)"}
    )
    packing: Packing = field(
        default=Packing.AUTO,
        metadata={"help": "auto, documents, concatenate or separate: how documents share a sequence"},
    )

    def __post_init__(self) -> None:
        for name in ("column", "separator"):
            if not is_unicode(getattr(self, name)):
                raise ConfigError(f"{name}: expected text in UTF-8, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """What to train on. Raises ConfigError naming the field. No ``paths``: the source of Python's standard library
    (``*.py``, without site-packages and tests).
    """

    validation_fraction: float = field(
        default=0.05, metadata={"help": "part of the text that is not trained on"}
    )
    max_bytes: int = field(
        default=64 << 20, metadata={"help": "most bytes of text that are read, where bytes are the tokens"}
    )
    batch_size: int = field(default=16, metadata={"help": "sequences of a step, of all ranks"})
    micro_batches: int = field(default=1, metadata={"help": "parts that a step's gradient is added up from"})
    micro_order: MicroOrder = field(
        default=MicroOrder.AUTO,
        metadata={
            "help": "auto, micro (each micro-batch passes all layers) or layer (each layer takes all micro-batches)"
        },
    )
    seed: int = field(default=0, metadata={"help": "of the order of the text"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_bytes", "batch_size", "micro_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(
                f"validation_fraction: expected more than 0 and less than 1, got {self.validation_fraction}"
            )

    @property
    def layer_major(self) -> bool:
        """Whether each layer takes all micro-batches of a step at once; with one micro-batch both orders are the same."""
        return self.micro_order is MicroOrder.LAYER and self.micro_batches > 1

    @property
    def passes(self) -> int:
        """How often a step passes the layers."""
        return 1 if self.layer_major else self.micro_batches

    def conditions(self) -> dict[str, object]:
        """What the bits of a run depend on, as JSON can hold it; what only tokenised documents have, where it is set."""
        settings, defaults = as_dict(self), as_dict(DataConfig())
        return {
            name: value
            for name, value in settings.items()
            if name not in _UNCONDITIONAL and (name not in _DOCUMENTS or value != defaults[name])
        }


def text_files(config: DataConfig) -> list[Path]:
    """The files of ``config``, in order. Raises DataError naming what is missing or empty of files."""
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
    """The files of ``config`` where every byte is a token. Raises DataError naming one that only a tokenizer makes sense of,
    unless the configuration says bytes.
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
    """Bytes of text that a run holds in memory: none where documents are tokenised, whose tokens are mapped. Raises
    DataError.
    """
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
