"""The checks of an import before its first write: that the checkpoint matches the model of its configuration, and that the
files beside it (configuration, tokenizer, tensors that the family ignores) are sound. Copies these files, too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tierstore.errors import ConfigError, DataError
from tierstore.hf.checkpoint import INDEX_NAME, Checkpoint, TensorInfo, TensorReader, refuse_pointer
from tierstore.hf.describing import CONFIG_NAME
from tierstore.hf.families import FAMILIES, Family, OnDisk
from tierstore.hf.manifest import MANIFEST_NAME, Manifest, ParameterEntry, Quantization
from tierstore.hf.weights import BLOCKS_SUFFIX, MXFP4_GROUP, PLAIN, SCALE_SUFFIX, SCALES_SUFFIX, scale_shape
from tierstore.hf.writing import Shard, StreamFile, json_bytes
from tierstore.store.disk.home import fsync_directory, write_durably
from tierstore.train.tokens.tokenizing import DocumentTokenizer

#: Names listed for each kind of fault; the error counts the rest.
_SHOWN = 5


def match(manifest: Manifest, checkpoint: Checkpoint) -> tuple[Manifest, tuple[TensorInfo, ...]]:
    """Compares the names, shapes and types of ``checkpoint`` with those of ``manifest``.

    Returns the manifest with the types on disk, and the tensors that the family ignores, in file order. Raises DataError,
    one line naming the tensors that are missing, unexpected, of another shape or of a type that is no weight's.
    """
    finder, family, held = _Finder(manifest, checkpoint), FAMILIES[manifest.model_type], manifest.experts
    types: dict[str, str] = {}
    for layer in held.layers:
        # A tensor that holds a whole layer is a part of its first expert.
        for expert in range(held.count if family.on_disk is OnDisk.SEPARATE else 1):
            for part in family.expert_parts(layer, expert, held):
                fused = part.index is not None
                shape = (held.count, *part.shape) if fused else part.shape
                types[part.source] = finder.weight(part.source, shape, fused)
    units = tuple(
        replace(unit, parameters=tuple(finder.entry(entry) for entry in unit.parameters))
        for unit in manifest.units
    )
    buffers = tuple(finder.entry(entry) for entry in manifest.buffers)
    shapes = {entry.name: entry.shape for entry in manifest.parameters()}
    tied = []
    for alias in manifest.tied:
        stored = alias.source in checkpoint.tensors
        if stored:
            finder.weight(alias.source, shapes[alias.of], False)
        tied.append(replace(alias, stored=stored))
    carried = finder.rest(family)
    finder.raise_problems()
    most = Counter(types.values()).most_common(1)[0][0]
    others = tuple((source, dtype) for source, dtype in types.items() if dtype != most)
    experts = replace(held, source_dtype=most, other_dtypes=others)
    return replace(manifest, units=units, buffers=buffers, tied=tuple(tied), experts=experts), carried


class _Finder:
    """Looks tensors up and collects their faults."""

    def __init__(self, manifest: Manifest, checkpoint: Checkpoint) -> None:
        self._quantization = manifest.quantization
        self._layers = manifest.layers
        self._checkpoint = checkpoint
        self._tensors = checkpoint.tensors
        self._used: set[str] = set()
        self._problems: dict[str, list[str]] = {
            "missing": [],
            "unexpected": [],
            "of another shape": [],
            "of a type that is not a weight's": [],
        }

    def entry(self, entry: ParameterEntry) -> ParameterEntry:
        return replace(entry, source_dtype=self.weight(entry.source, entry.shape, False))

    def weight(self, source: str, shape: tuple[int, ...], of_experts: bool) -> str:
        """The type of ``source`` on disk, whose expected shape is ``shape``; ``MXFP4`` for blocks with their scales."""
        info = self._tensors.get(source)
        if info is None and of_experts and self._quantization is Quantization.MXFP4 and len(shape) == 3:
            return self._mxfp4(source, shape)
        if info is None:
            self._problems["missing"].append(source)
            return ""
        self._take(source, shape)
        if info.dtype == "F8_E4M3" and self._quantization is Quantization.FP8_BLOCKS and len(shape) == 2:
            scale = source + SCALE_SUFFIX
            if scale not in self._tensors:
                self._problems["missing"].append(scale)
            else:
                self._take(scale, scale_shape(*shape))
                self._check_type(scale, PLAIN)
        else:
            self._check_type(source, PLAIN)
        return info.dtype

    def _mxfp4(self, source: str, shape: tuple[int, ...]) -> str:
        experts, columns, rows = shape  # in memory it is transposed
        groups = columns // MXFP4_GROUP
        wanted = {
            source + BLOCKS_SUFFIX: (experts, rows, groups, MXFP4_GROUP // 2),
            source + SCALES_SUFFIX: (experts, rows, groups),
        }
        for name, expected in wanted.items():
            if name not in self._tensors:
                self._problems["missing"].append(name)
            else:
                self._take(name, expected)
                self._check_type(name, {"U8": None})
        return "MXFP4"

    def _take(self, source: str, shape: tuple[int, ...]) -> None:
        self._used.add(source)
        found = self._tensors[source].shape
        if found != shape:
            self._problems["of another shape"].append(f"{source} {_text(found)}, expected {_text(shape)}")

    def _check_type(self, source: str, known: Mapping[str, object]) -> None:
        dtype = self._tensors[source].dtype
        if dtype not in known:
            self._problems["of a type that is not a weight's"].append(
                f"{source} {dtype}, expected {' or '.join(known)}"
            )

    def rest(self, family: Family) -> tuple[TensorInfo, ...]:
        """The unused tensors that the family ignores, which are carried along; the others count as unexpected."""
        carried = []
        for name, info in self._tensors.items():
            if name in self._used:
                continue
            if family.is_carried(name, self._layers):
                carried.append(info)
            else:
                self._problems["unexpected"].append(name if name.isprintable() else repr(name))
        return tuple(sorted(carried, key=lambda info: (info.file, info.offset)))

    def raise_problems(self) -> None:
        """Raises DataError if any faults were found."""
        lines = [
            f"{len(names)} {'tensors' if len(names) > 1 else 'tensor'} {what}: {_list(names)}"
            for what, names in self._problems.items()
            if names
        ]
        if not lines:
            return
        unlisted = self._checkpoint.unlisted
        if self._problems["missing"] and unlisted:
            lines.append(f"{_list(unlisted)} in the same directory are not in the index")
        raise DataError(f"{self._checkpoint.directory}: not the model of its config.json: {'; '.join(lines)}")


def _list(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _text(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


# Beside the records -----------------------------------------------------------------------------------------


_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}
_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_TEMPLATES = "additional_chat_templates"
#: The largest file that is taken for a tokenizer's, in bytes.
_MOST_BYTES = 256 << 20
#: The approximate size of one file of carried tensors.
_CARRIED_BYTES = 4 << 30


def companion_files(directory: Path) -> list[str]:
    """Names of the configuration and tokenizer files of a model directory, in order, without code."""
    names = [
        path.name
        for path in directory.iterdir()
        if path.is_file()
        and (path.suffix in _SUFFIXES or path.name.startswith(_NAMES))
        and path.name not in (INDEX_NAME, MANIFEST_NAME)
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= _MOST_BYTES
    ]
    names += [f"{_TEMPLATES}/{path.name}" for path in (directory / _TEMPLATES).glob("*.jinja")]
    return sorted(names)


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Raises DataError if the embedding lacks a row for one of the tokenizer's tokens, or if one of its files that are not
    JSON is a git-lfs pointer, which would be taken for a template or a vocabulary.
    """
    for name in companion_files(directory):
        if not name.endswith(".json"):
            with (directory / name).open("rb") as file:
                refuse_pointer(directory / name, file.read(8))
    path = directory / "tokenizer.json"
    if not path.exists():
        return
    content = path.read_bytes()
    refuse_pointer(path, content)
    try:
        value = json.loads(content)
        vocabulary = value.get("model", {}).get("vocab", {})
        numbers = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        numbers += [token["id"] for token in value.get("added_tokens") or ()]
        largest = max((int(number) for number in numbers), default=-1)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a tokenizer: {error}") from error
    if largest >= vocab_size:
        raise DataError(
            f"{path}: token {largest} is beyond the model's vocabulary of {vocab_size} (vocab_size in {CONFIG_NAME})"
        )


def companion_notes(directory: Path) -> Iterator[str]:
    """A line for each companion file whose damage is no reason to refuse the model."""
    path = directory / "generation_config.json"
    if path.exists():
        try:
            whole = isinstance(json.loads(path.read_bytes()), dict)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            yield f"{path}: not a JSON object; ignored"
    if (directory / "tokenizer.json").exists():
        try:
            DocumentTokenizer(directory)
        except (ConfigError, DataError) as error:
            yield f"{error}; the model is imported, but without a tokenizer it cannot read or write text"


def copy_companions(source: Path, target: Path, names: Sequence[str], quantization: Quantization) -> None:
    """Copies ``names`` into ``target``, durably. The configuration loses its quantisation, since records are dequantised."""
    for name in names:
        content = (source / name).read_bytes()
        if name == CONFIG_NAME and quantization is not Quantization.NONE:
            config = json.loads(content)
            config.pop("quantization_config", None)
            content = json_bytes(config, ensure_ascii=True)  # the bytes of earlier stores
        path = target / name
        if path.parent != target:
            path.parent.mkdir(exist_ok=True)
            fsync_directory(path.parent)
        write_durably(path, content)
        fsync_directory(path.parent)


def carried_files(infos: Sequence[TensorInfo]) -> list[tuple[str, list[TensorInfo]]]:
    """Which file each carried tensor goes to, in order."""
    files: list[tuple[str, list[TensorInfo]]] = []
    held = 0
    for info in infos:
        if not files or held + info.nbytes > _CARRIED_BYTES:
            files.append((f"carried-{len(files):05d}.safetensors", []))
            held = 0
        files[-1][1].append(info)
        held += info.nbytes
    return files


def copy_carried(infos: Sequence[TensorInfo], target: Path, reader: TensorReader) -> None:
    """Copies the carried tensors into ``target``, byte for byte, durably. Files that are whole already stay."""
    for name, held in carried_files(infos):
        shard, path = Shard(name, tuple(held)), target / name
        if path.exists() and path.stat().st_size == len(shard.header) + shard.data_bytes:
            continue  # a file gets its final name only when it is whole
        partial = path.with_name(f"{name}.partial")
        partial.unlink(missing_ok=True)  # left by an interrupted import
        with StreamFile(partial) as file:
            file.append(np.frombuffer(shard.header, np.uint8))
            for info in held:
                for piece in reader.chunks(info):
                    file.append(piece)
            file.finish()
        partial.rename(path)
        fsync_directory(target)
