"""The on-disk format: the files of a store directory, and the layout of record slots.

``docs/FORMAT.md`` is the same in prose; ``tierstore.store.index.table`` packs the index values. Everything is
little-endian.

A store directory holds::

    tierstore.json            identity: format version, uuid, which of the store's directories this is
    lease                     flock()ed, as the directory is, by the one process that has the store open; holds its pid
    index/data.mdb            LMDB: databases `meta`, `records`, `state`, `snapshots`
    extents/<schema>.<group>  equal slots, slot i at byte i * slot_bytes

A *record* is everything stored about one expert or one dense slice. Its sections are arranged in *groups*
(`weights`, `moments`); the group is the unit of residency, of dirtiness, of I/O and of copy on write, so each
group of a record has a slot of its own. In a slot the sections of the group lie one after another, each
starting at a multiple of ``SECTION_ALIGNMENT`` bytes; the gaps are zero. Checksums are CRC-32C over a
section's ``nbytes`` bytes, without the gap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property

import numpy as np

from tierstore.errors import ConfigError, StoreFormatError
from tierstore.quant.layout import CodeFormat, QuantizedLayout

FORMAT_VERSION = 2
#: The index of a store that has records with narrow moments has this version instead. Versions of tierstore that know
#: only FORMAT_VERSION refuse such a store; other stores do not change, byte for byte.
NARROW_MOMENTS_VERSION = 3
#: The same for a store with quantised weights.
QUANTIZED_WEIGHTS_VERSION = 4
#: Sections start at multiples of this many bytes, in files and in memory: enough for direct I/O everywhere.
SECTION_ALIGNMENT = 4096


class Group(IntEnum):
    """A section group. ``GRADIENTS`` is scratch: it spills to disk but is never part of a commit."""

    WEIGHTS = 0
    MOMENTS = 1
    GRADIENTS = 2

    @property
    def label(self) -> str:
        return self.name.lower()


#: The groups in a commit; of frozen records only the weights (``RecordSchema.groups``).
COMMITTED_GROUPS = (Group.WEIGHTS, Group.MOMENTS)


class WeightFormat(Enum):
    """The storage format of weights.

    ``SPLIT_BF16`` keeps the bf16 rounding of an fp32 master weight (``weight_hi``, all that a forward pass reads) apart
    from a 16-bit remainder (``weight_lo``); merging them is exact. The others are only for frozen records, since AdamW
    steps an fp32 master weight: ``BF16`` keeps only the rounding; ``INT8`` and ``INT4`` keep codes with fp32 scales
    (``QuantizedLayout``).
    """

    FP32 = "fp32"
    SPLIT_BF16 = "split-bf16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def codes(self) -> CodeFormat | None:
        """The codes of quantised weights; None for other formats."""
        return CodeFormat(self.value) if self in (WeightFormat.INT8, WeightFormat.INT4) else None


class MomentFormat(Enum):
    """The storage format of AdamW's two moments on disk and in the host cache; steps compute in fp32.

    ``BF16`` rounds each to bf16. ``INT8`` quantises blocks of ``MOMENT_BLOCK`` elements to 8 bits, each with an fp32
    scale. Both round by a hash of the record's key, the section, the step and the element, so that every layout, kill
    and replay gives the same bits.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


#: Elements of one block of ``MomentFormat.INT8``, which share a scale.
MOMENT_BLOCK = 256


class Training(Enum):
    """Whether a class of records is trained. A frozen record has only weights: it is written once, when it is registered,
    and only read afterwards; optimizer steps do not affect or count it.
    """

    TRAINED = "trained"
    FROZEN = "frozen"


class Placement(Enum):
    """The holder of a record in memory: the host cache, or its owner, which writes it through at commits."""

    CACHED = "cached"
    DIRECT = "direct"


#: The allowed formats of trained and of frozen weights.
TRAINED_FORMATS = (WeightFormat.FP32, WeightFormat.SPLIT_BF16)
FROZEN_FORMATS = (WeightFormat.BF16, WeightFormat.FP32, WeightFormat.INT8, WeightFormat.INT4)


@dataclass(frozen=True)
class Section:
    """An array of ``numel`` elements of numpy dtype ``dtype`` within a group."""

    name: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * np.dtype(self.dtype).itemsize

    @property
    def padded_nbytes(self) -> int:
        return -(-self.nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT

    @property
    def is_scale(self) -> bool:
        """Whether it holds the scales of blocks of another section."""
        return self.name.endswith("_scale")


@dataclass(frozen=True)
class GroupLayout:
    """The sections of one group, in file order. ``first_section`` counts the sections of the groups before it."""

    group: Group
    sections: tuple[Section, ...]
    first_section: int

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot, gaps included."""
        return sum(section.padded_nbytes for section in self.sections)

    @property
    def nbytes(self) -> int:
        """Bytes of content, gaps excluded."""
        return sum(section.nbytes for section in self.sections)


@dataclass(frozen=True)
class RecordSchema:
    """The shape of a class of records: AdamW state of ``numel`` parameters, on disk 12 bytes a parameter (8 with moments in
    bf16, 6.03 in int8); or, frozen, their weights alone, 2 bytes (BF16), 4 (FP32), 1.06 (INT8) or 0.63 (INT4).

    ``quantized`` is the layout of INT8 and INT4; other formats have none.
    ``name`` names the extent files, so it is limited to letters, digits, ``-`` and ``_``.
    """

    name: str
    numel: int
    weight_format: WeightFormat = WeightFormat.FP32
    placement: Placement = Placement.CACHED
    training: Training = Training.TRAINED
    moments: MomentFormat = MomentFormat.FP32
    quantized: QuantizedLayout | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"schema name {self.name!r}: expected letters, digits, '-' and '_'")
        if self.numel < 1:
            raise ConfigError(f"schema {self.name}: numel must be at least 1, got {self.numel}")
        allowed = FROZEN_FORMATS if self.frozen else TRAINED_FORMATS
        if self.weight_format not in allowed:
            expected = " or ".join(weight_format.value for weight_format in allowed)
            raise ConfigError(
                f"schema {self.name}: {self.training.value} records are stored as {expected}, "
                f"got {self.weight_format.value}"
            )
        if self.frozen and self.moments is not MomentFormat.FP32:
            raise ConfigError(f"schema {self.name}: frozen records have no moments, got {self.moments.value}")
        layout = self.quantized
        if (None if layout is None else layout.codes) is not self.weight_format.codes:
            raise ConfigError(
                f"schema {self.name}: weights in {self.weight_format.value}, with a layout of "
                f"{'none' if layout is None else layout.codes.value}"
            )
        if layout is not None and layout.numel != self.numel:
            raise ConfigError(f"schema {self.name}: {self.numel} weights, with a layout of {layout.numel}")

    @property
    def frozen(self) -> bool:
        """Whether its records are read only."""
        return self.training is Training.FROZEN

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of a record in a commit."""
        return COMMITTED_GROUPS[:1] if self.frozen else COMMITTED_GROUPS

    @property
    def nbytes(self) -> int:
        """Bytes of a record's content in a commit."""
        return sum(self.layout(group).nbytes for group in self.groups)

    def layout(self, group: Group) -> GroupLayout:
        """The sections of ``group``; a frozen record has only those of the weights."""
        return self._layouts[group]

    @cached_property
    def _layouts(self) -> tuple[GroupLayout, ...]:
        return tuple(self._make_layout(group) for group in Group)

    def _make_layout(self, group: Group) -> GroupLayout:
        if self.frozen:
            sections = (self._frozen_section(),)
            return GroupLayout(group, sections, 0) if group is Group.WEIGHTS else GroupLayout(group, (), 1)
        weights: tuple[Section, ...] = (Section("weight", "<f4", self.numel),)
        moments = moment_sections(self.moments, self.numel)
        if self.weight_format is WeightFormat.SPLIT_BF16:
            weights = (Section("weight_hi", "<u2", self.numel),)
            moments = (Section("weight_lo", "<i2", self.numel), *moments)
        groups = (weights, moments, (Section("gradient", "<f4", self.numel),))
        return GroupLayout(group, groups[group], sum(map(len, groups[:group])))

    def _frozen_section(self) -> Section:
        if self.quantized is not None:
            return Section("weight", "|u1", self.quantized.nbytes)
        return Section("weight", "<f4" if self.weight_format is WeightFormat.FP32 else "<u2", self.numel)

    @cached_property
    def sections(self) -> int:
        """The number of sections of a record, in all groups."""
        return sum(len(self.layout(group).sections) for group in Group)

    @property
    def record_bytes(self) -> int:
        """Bytes of content of one record, scratch excluded."""
        return sum(self.layout(group).nbytes for group in self.groups)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "numel": self.numel,
            "weight_format": self.weight_format.value,
            "placement": self.placement.value,
            # Stores without later features do not change, byte for byte.
            **({"training": self.training.value} if self.frozen else {}),
            **({} if self.moments is MomentFormat.FP32 else {"moments": self.moments.value}),
            **({} if self.quantized is None else self.quantized.as_json()),
        }

    @classmethod
    def from_json(cls, value: dict[str, object]) -> RecordSchema:
        """The inverse of ``as_json``. Raises StoreFormatError for other values."""
        try:
            weight_format = WeightFormat(value["weight_format"])
            codes = weight_format.codes
            return cls(
                str(value["name"]),
                int(str(value["numel"])),
                weight_format,
                Placement(value["placement"]),
                Training(value.get("training", Training.TRAINED.value)),
                MomentFormat(value.get("moments", MomentFormat.FP32.value)),
                None if codes is None else QuantizedLayout.from_json(codes, value["parts"]),
            )
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise StoreFormatError(f"not a record schema: {value!r} ({error})") from error


def moment_sections(moments: MomentFormat, numel: int) -> tuple[Section, ...]:
    """The sections of the two moments of ``numel`` parameters. All zeros is the state before the first step."""
    if moments is MomentFormat.INT8:
        blocks = -(-numel // MOMENT_BLOCK)
        return (
            Section("exp_avg", "|u1", numel),
            Section("exp_avg_sq", "|u1", numel),
            Section("exp_avg_scale", "<f4", blocks),
            Section("exp_avg_sq_scale", "<f4", blocks),
        )
    dtype = "<f4" if moments is MomentFormat.FP32 else "<u2"
    return (Section("exp_avg", dtype, numel), Section("exp_avg_sq", dtype, numel))


def format_version(schemas: Iterable[RecordSchema]) -> int:
    """The format version in the index of a store with ``schemas``."""
    schemas = list(schemas)
    if any(schema.quantized is not None for schema in schemas):
        return QUANTIZED_WEIGHTS_VERSION
    narrow = any(schema.moments is not MomentFormat.FP32 for schema in schemas)
    return NARROW_MOMENTS_VERSION if narrow else FORMAT_VERSION
