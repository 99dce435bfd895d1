"""What a run takes on each tier, in bytes, by the same arithmetic by which tierstore reserves it.

Per rank. Experts are spread evenly over the ranks (each rank's in a store of its own), dense parameters are cut into slices
of 1/N. Everything here is computed by the functions that ``train`` itself divides its budgets and reserves its space by,
so a plan and a run cannot disagree; what is not known without running (the process itself) says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from tierstore.dense.config import Reshard
from tierstore.errors import ConfigError
from tierstore.plan.architecture import Architecture
from tierstore.plan.evidence import Evidence
from tierstore.prefetch.schedule import QueueLimits, Schedule, Unit, Window
from tierstore.stats import Tier
from tierstore.store.format import Placement, RecordSchema, WeightFormat
from tierstore.store.index import index_bytes
from tierstore.store.space import copies, extent_bytes, scratch_bytes
from tierstore.train.budgets import EXPERT_SCHEMA, Budgets, DeviceKind, budgets, expert_schema
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import DENSE_STATE_BYTES, WORKING_BYTES
from tierstore.units import format_bytes

__all__ = ["PROCESS_BYTES", "Capacity", "Ranks", "Setting", "Term", "capacity"]

#: An interpreter that has imported torch and tierstore, where no profile says what it takes here.
PROCESS_BYTES = 330 << 20


@dataclass(frozen=True, slots=True)
class Term:
    """One line of a plan: ``nbytes`` on ``tier``, and how they come about."""

    tier: Tier
    name: str
    nbytes: int
    formula: str
    evidence: Evidence = Evidence.FORMULA


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many processes there are, how far they gather ahead, and what they gather in."""

    count: int = 1
    horizontal: QueueLimits = field(default_factory=QueueLimits)
    reshard: Reshard = Reshard.AFTER_FORWARD
    #: Gradients of so many parameters are scattered together.
    bucket_numel: int = 1 << 22

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"--ranks: expected at least 1, got {self.count}")
        if self.bucket_numel < 1:
            raise ConfigError(f"bucket_numel: expected at least 1, got {self.bucket_numel}")

    def share(self, whole: int) -> int:
        """The largest part of ``whole`` that one rank has."""
        return -(-whole // self.count)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned for: a run's configuration, the model's counts, the ranks, the device."""

    config: TrainConfig
    model: Architecture
    ranks: Ranks = field(default_factory=Ranks)
    device: DeviceKind = DeviceKind.CPU
    process_bytes: int = PROCESS_BYTES
    process_evidence: Evidence = Evidence.ASSUMED
    #: What the files hold (``train.files.text_bytes``).
    text_bytes: int = 0

    @property
    def schema(self) -> RecordSchema:
        """The experts' records."""
        own = expert_schema(self.config)
        return RecordSchema(EXPERT_SCHEMA, self.model.expert_numel, own.weight_format)

    @property
    def records(self) -> int:
        """Experts of one rank, at most."""
        return self.ranks.share(self.model.experts) * len(self.model.moe_layers)

    @property
    def schedule(self) -> Schedule:
        """One step's passes over the units, as the scheduler would walk them."""
        itemsize = self.config.model.compute_dtype.itemsize
        moe = set(self.model.moe_layers)
        *blocks, ends = self.model.units
        units = [
            Unit(f"block {i}", self.gathered(numel, itemsize), i if i in moe else None)
            for i, numel in enumerate(blocks)
        ]
        return Schedule(
            units=(*units, Unit("ends", self.gathered(ends, itemsize))),
            horizontal=self.ranks.horizontal,
            vertical=QueueLimits(self.config.prefetch.depth),
            plan=self.config.gradient_plan,
            reshard=self.ranks.reshard,
            micro_batches=self.config.data.micro_batches,
        )

    def gathered(self, numel: int, itemsize: int) -> int:
        """Bytes of a unit put together from its slices: nothing on one rank, which has it whole."""
        return self.ranks.share(numel) * self.ranks.count * itemsize if self.ranks.count > 1 else 0


@dataclass(frozen=True)
class Capacity:
    """What one rank takes."""

    terms: tuple[Term, ...]
    divided: Budgets

    def total(self, *tiers: Tier) -> int:
        """Bytes on ``tiers``."""
        return sum(term.nbytes for term in self.terms if term.tier in tiers)

    def term(self, name: str) -> Term:
        """The line of that name. Raises KeyError."""
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(name)


def capacity(setting: Setting) -> Capacity:
    """Bytes of one rank on each tier. Raises BudgetError for budgets that no run could start with."""
    divided = budgets(setting.config, setting.device, setting.schema)
    terms = [
        *_device_terms(setting, divided),
        *_host_terms(setting, divided),
        *_disk_terms(setting),
    ]
    return Capacity(tuple(term for term in terms if term.nbytes), divided)


def _device_terms(setting: Setting, divided: Budgets) -> Iterable[Term]:
    config, model, ranks = setting.config, setting.model, setting.ranks
    own = sum(ranks.share(numel) for numel in model.units)
    yield Term(
        Tier.DEVICE,
        "dense state",
        own * DENSE_STATE_BYTES,
        f"{DENSE_STATE_BYTES} B x {own} parameters, the slices of 1/{ranks.count} of {model.dense}",
    )
    if ranks.count > 1:
        yield from _horizontal_terms(setting)
    slots = divided.slots
    yield Term(
        Tier.DEVICE,
        "expert slots",
        divided.device,
        f"{slots.weights} of weights x {slots.weight_bytes} B + {slots.gradients} of gradients x "
        f"{slots.gradient_bytes} B",
    )
    tokens = config.tokens_per_micro_batch
    yield Term(
        Tier.DEVICE,
        "activations",
        config.model.activation_bytes(tokens),
        f"upper estimate for {tokens} tokens, checkpoint_activations = {config.model.checkpoint_activations.value}, "
        f"expert_activations = {config.model.expert_activations.value}",
    )


def _horizontal_terms(setting: Setting) -> Iterable[Term]:
    schedule, ranks = setting.schedule, setting.ranks
    peak = most_gathered(schedule)
    yield Term(
        Tier.DEVICE,
        "fusion buffers",
        peak,
        f"the most that {ranks.horizontal.depth} passes ahead hold gathered at once: of depth independent, "
        f"unless kept to backward",
    )
    # One bucket fills while the one before it is on its way.
    largest = max(setting.model.units)
    bucket = min(ranks.bucket_numel, sum(setting.model.units)) * 4
    yield Term(
        Tier.DEVICE,
        "gradient buckets",
        2 * bucket,
        f"2 x {format_bytes(bucket)} of fp32 gradients (the largest unit has {largest} parameters)",
    )


@lru_cache(maxsize=256)
def most_gathered(schedule: Schedule) -> int:
    """The most bytes that the horizontal queue holds gathered at a time, over two steps."""
    window = Window(schedule, training=True)
    window.begin()
    most = window.nbytes
    for position in range(2 * len(schedule.passes)):
        window.leave(position)
        most = max(most, window.nbytes)
    return most


def _host_terms(setting: Setting, divided: Budgets) -> Iterable[Term]:
    config = setting.config
    yield Term(
        Tier.HOST,
        "expert cache",
        divided.cache,
        "host_budget" + (" - expert slots" if setting.device is DeviceKind.CPU else ""),
    )
    if setting.device is not DeviceKind.CPU:
        slots = divided.slots
        yield Term(
            Tier.HOST,
            "gradient landing",
            slots.gradients * slots.gradient_bytes,
            f"{slots.gradients} x {slots.gradient_bytes} B, pinned",
        )
        own = sum(setting.ranks.share(numel) for numel in setting.model.units)
        yield Term(Tier.HOST, "dense staging", 12 * own, f"12 B x {own} parameters, for commits")
    yield Term(
        Tier.HOST,
        "process",
        setting.process_bytes,
        "an interpreter with torch and its libraries",
        setting.process_evidence,
    )
    yield Term(
        Tier.HOST, "text", min(setting.text_bytes, config.data.max_bytes), "the files, at most data.max_bytes"
    )
    yield Term(Tier.HOST, "working memory", WORKING_BYTES, "thread pools and fragmentation", Evidence.ASSUMED)


def _disk_terms(setting: Setting) -> Iterable[Term]:
    config, schema, retain = setting.config, setting.schema, setting.config.retain
    of = f"x {copies(retain)} copies (the live one, the last commit's, {retain} snapshots)"
    yield Term(
        Tier.NVME,
        "expert extents",
        extent_bytes(schema, setting.records, retain),
        f"{setting.records} records x {record_slot_bytes(schema)} B (12 B x {schema.numel}, sections padded) {of}",
    )
    dense = Counter(setting.ranks.share(numel) for numel in setting.model.units)
    slices = [
        (RecordSchema(f"dense-{numel}", numel, WeightFormat.FP32, Placement.DIRECT), count)
        for numel, count in dense.items()
    ]
    yield Term(
        Tier.NVME,
        "dense extents",
        sum(extent_bytes(one, count, retain) for one, count in slices),
        f"12 B x {sum(numel * count for numel, count in dense.items())} parameters of "
        f"{sum(dense.values())} units, padded, {of}",
    )
    records = setting.records + sum(dense.values())
    yield Term(
        Tier.NVME, "index", index_bytes(records, retain), f"{records} entries, written anew twice over"
    )
    if config.keeps_gradients:
        yield Term(
            Tier.NVME,
            "gradient scratch",
            scratch_bytes(schema, setting.records),
            f"4 B x {schema.numel} of each of {setting.records} experts: clipping, or micro_batches > 1",
        )


def record_slot_bytes(schema: RecordSchema) -> int:
    """Bytes that one record takes in its extents, padding included."""
    return extent_bytes(schema, 1, 0) // copies(0)
