"""Whether a checkpoint is of the model that its configuration describes: found out before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.errors import DataError
from tierstore.hf.checkpoints.checkpoint import Checkpoint, TensorInfo
from tierstore.hf.checkpoints.quantized import MXFP4_GROUP, scale_shape
from tierstore.hf.checkpoints.weights import BLOCKS_SUFFIX, PLAIN, SCALE_SUFFIX, SCALES_SUFFIX
from tierstore.hf.families import FAMILIES, Family, OnDisk, Part
from tierstore.hf.manifest import Manifest, ParameterEntry, Quantization

#: Names that an error gives of each kind; it says how many more there are.
_SHOWN = 5


@dataclass(frozen=True)
class Matched:
    """A checkpoint and its model: ``manifest`` knows the types on disk; ``carried`` are the tensors that the family
    ignores, in file order.
    """

    manifest: Manifest
    checkpoint: Checkpoint
    carried: tuple[TensorInfo, ...]

    @property
    def family(self) -> Family:
        return FAMILIES[self.manifest.model_type]

    def expert_parts(self, layer: int, expert: int) -> list[Part]:
        """The tensors of one expert, in the order of its record."""
        experts = self.manifest.experts
        return self.family.expert_parts(layer, expert, experts.d_model, experts.d_ff)


def match(manifest: Manifest, checkpoint: Checkpoint) -> Matched:
    """Compares the names, shapes and types of ``checkpoint`` with those of ``manifest``.

    Raises DataError, one line that names what is missing, unexpected, of another shape or of a type that is no weight's.
    """
    finder = _Finder(manifest, checkpoint)
    types = {
        part.source: finder.weight(part.source, _whole_shape(manifest, part), part.index is not None)
        for parts in _experts(manifest)
        for part in parts
    }
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
    carried = finder.rest(FAMILIES[manifest.model_type])
    finder.raise_problems()
    most = Counter(types.values()).most_common(1)[0][0]
    others = tuple((source, dtype) for source, dtype in types.items() if dtype != most)
    experts = replace(manifest.experts, source_dtype=most, other_dtypes=others)
    made = replace(manifest, units=units, buffers=buffers, tied=tuple(tied), experts=experts)
    return Matched(made, checkpoint, tuple(carried))


def _experts(manifest: Manifest) -> Iterator[list[Part]]:
    """The parts of all experts; of tensors that hold a whole layer, those of its first expert."""
    family, experts = FAMILIES[manifest.model_type], manifest.experts
    each = range(experts.count) if family.on_disk is OnDisk.SEPARATE else range(1)
    for layer in experts.layers:
        for expert in each:
            yield family.expert_parts(layer, expert, experts.d_model, experts.d_ff)


def _whole_shape(manifest: Manifest, part: Part) -> tuple[int, ...]:
    return part.shape if part.index is None else (manifest.experts.count, *part.shape)


class _Finder:
    """Looks tensors up, and collects what is wrong with them."""

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
        """The type of ``source`` on disk, which ought to have ``shape``; ``MXFP4`` for blocks with their scales."""
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

    def rest(self, family: Family) -> list[TensorInfo]:
        """The tensors that nothing asked for and that are carried along; the others are unexpected."""
        carried = []
        for name, info in self._tensors.items():
            if name in self._used:
                continue
            if family.is_carried(name, self._layers):
                carried.append(info)
            else:
                self._problems["unexpected"].append(name)
        return sorted(carried, key=lambda info: (info.file, info.offset))

    def raise_problems(self) -> None:
        """Raises DataError if there were any."""
        lines = [
            f"{len(names)} {'tensors' if len(names) > 1 else 'tensor'} {what}: {_list(names)}"
            for what, names in self._problems.items()
            if names
        ]
        if not lines:
            return
        unlisted = self._checkpoint.unlisted
        if self._problems["missing"] and unlisted:
            lines.append(f"{_list(unlisted)} in the same directory belong to no index")
        raise DataError(f"{self._checkpoint.directory}: not the model of its config.json: {'; '.join(lines)}")


def _list(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _text(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
