"""Bytes that one rank of a run takes on each tier, for each use of a model.

Experts are spread evenly over the ranks, each rank's in its own store; dense parameters are cut into slices of 1/N. All
figures come from the functions of ``train`` that divide budgets and reserve space, so plan and run agree. What only a run
can show, such as the size of the process, is marked as assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tierstore.accelerator import device_reserve
from tierstore.config import check_least
from tierstore.dense.config import OptimizerState
from tierstore.dense.layout import DenseBytes, UnitLayout, blocks_held, gather_copies
from tierstore.errors import ConfigError
from tierstore.hf.manifest import Weights
from tierstore.hf.spec import HfSpec, pair_parameters
from tierstore.machine_profile import ASSUMED, Evidence
from tierstore.model.architecture import Architecture
from tierstore.model.store_schema import PAIR_SCHEMA, expert_record, quantized_layout
from tierstore.moe.lora import LoraConfig, LoraTargets, PairShape
from tierstore.prefetch.schedule import Schedule, unit_schedule
from tierstore.stats import Tier
from tierstore.store.disk.store_extents import copies, extent_bytes, schema_copies, scratch_bytes
from tierstore.store.format import MomentFormat, Placement, RecordSchema, Training
from tierstore.store.index.database import index_bytes
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import BoundarySplit, Budgets, adds_up, budgets, least_host_budget
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import FixedCost, boundary_split, fixed_cost, flat_layouts, rank_tokens
from tierstore.train.vocabulary import VocabularyTables, choose_vocabulary

#: The tiers that hold bytes of a run, fastest first.
TIERS = (Tier.DEVICE, Tier.HOST, Tier.NVME)


@dataclass(frozen=True, slots=True)
class Term:
    """One line of a plan: ``nbytes`` on ``tier``, and the formula behind them."""

    tier: Tier
    name: str
    nbytes: int
    formula: str
    evidence: Evidence = Evidence.FORMULA


#: The default rank of LoRA pairs.
DEFAULT_RANK = 16


class Use(StrEnum):
    """The use of a model. Only ``FULL`` writes experts."""

    FULL = "full"  # every parameter is trained
    LORA = "lora"  # LoRA pairs of attention and experts are trained; experts' pairs are records
    LORA_ATTENTION = "lora-attention"  # only LoRA pairs of attention are trained
    SERVE = "serve"  # forward passes only


@dataclass(frozen=True, kw_only=True)
class ModelUsage:
    """A use of one model. ``attention``: parameters of attention's pairs by dense unit. ``pairs``: the record of one
    expert's pairs. ``tokens``: in one pass of one rank (0: a micro-batch's).
    """

    use: Use = Use.FULL
    rank: int = 0
    attention: tuple[int, ...] = ()
    pairs: RecordSchema | None = None
    tokens: int = 0

    @property
    def frozen(self) -> bool:
        """Whether experts are read-only."""
        return self.use is not Use.FULL

    @property
    def trains(self) -> bool:
        """Whether the use has backward passes."""
        return self.use is not Use.SERVE


def usage_of(spec: HfSpec, use: Use, rank: int, moments: MomentFormat = MomentFormat.FP32) -> ModelUsage:
    """The ModelUsage for ``use``, with LoRA pairs of ``rank`` and moments in the format ``moments``. Raises ConfigError."""
    if use in (Use.FULL, Use.SERVE):
        return ModelUsage(use=use)
    if rank < 1:
        raise ConfigError(f"--lora: expected at least 1, got {rank}")
    attention = pair_parameters(spec.manifest, LoraConfig(rank=rank))
    if use is Use.LORA_ATTENTION:
        return ModelUsage(use=use, rank=rank, attention=attention)
    try:
        numel = PairShape(spec.expert_shape, rank, float(rank)).numel
    except ConfigError as error:
        raise ConfigError(str(error).replace("lora.rank", "--lora")) from error
    pairs = RecordSchema(PAIR_SCHEMA, numel, moments=moments)
    return ModelUsage(use=use, rank=rank, attention=attention, pairs=pairs)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned: a run's configuration, the model's counts, the ranks, the device and the use.

    Each group of ``expert`` ranks shares one copy of the experts (0: all ranks).

    A use other than full training needs an imported model (``HfSpec``).
    """

    config: TrainConfig
    model: Architecture
    ranks: int = 1
    expert: int = 0
    device: DeviceKind = DeviceKind.CPU
    process_bytes: int = ASSUMED.process_bytes
    process_evidence: Evidence = Evidence.ASSUMED
    #: Memory of the accelerator in bytes; None if unknown.
    device_memory: int | None = None
    #: Size of the training text (``train.files.text_bytes``).
    text_bytes: int = 0
    usage: ModelUsage = field(default_factory=ModelUsage)

    def __post_init__(self) -> None:
        check_least(self, 1, "ranks", table="--")
        if self.expert < 0 or (self.expert and self.ranks % self.expert):
            raise ConfigError(
                f"parallel.expert: expected a divisor of the {self.ranks} ranks, got {self.expert}"
            )
        if self.config.data.batch_size % self.ranks and not self.config.tasks:
            raise ConfigError(
                f"data.batch_size: expected a multiple of the {self.ranks} ranks, "
                f"got {self.config.data.batch_size}"
            )

    @property
    def sharing(self) -> int:
        """Ranks that share one copy of the experts."""
        return self.expert or self.ranks

    @property
    def replicas(self) -> int:
        """Copies of the experts."""
        return self.ranks // self.sharing

    @property
    def run_config(self) -> TrainConfig:
        """The configuration by which budgets are divided; it includes the experts' pairs that this use trains."""
        beside = LoraConfig(rank=self.usage.rank, targets=LoraTargets.EXPERTS)
        return replace(self.config, lora=beside if self.usage.pairs else LoraConfig())

    @property
    def schema(self) -> RecordSchema:
        """The schema of the experts' records."""
        numel, compute = self.model.expert_numel, self.config.model.compute_dtype
        moments, quantized = self.config.adamw.moments, quantized_layout(self.config.spec)
        return expert_record(numel, compute, self.training, moments, quantized=quantized)

    @property
    def training(self) -> Training:
        """Whether experts, and the dense parameters beside attention's pairs, are trained."""
        return Training.FROZEN if self.usage.frozen else Training.TRAINED

    @property
    def schemas(self) -> list[RecordSchema]:
        """The schemas of the records in the host cache: the experts', and that of their pairs, if any."""
        return [self.schema] + ([self.usage.pairs] if self.usage.pairs else [])

    @property
    def least_host_budget(self) -> int:
        """The smallest host budget that a run starts with, in bytes."""
        return least_host_budget(self.run_config, self.device, self.schema, sums=self.sums)

    @property
    def sums(self) -> bool:
        """Whether gradient slots add up products (``train.budgets.adds_up``)."""
        return adds_up(self.config, experts=self.model.experts, replicas=self.replicas, sharing=self.sharing)

    @property
    def local_experts(self) -> int:
        """The most experts of one layer on one rank."""
        return -(-self.model.experts // self.sharing)

    @property
    def records(self) -> int:
        """The most experts on one rank."""
        return self.local_experts * len(self.model.moe_layers)

    @property
    def tokens(self) -> int:
        """Tokens in one pass of one rank: ``usage.tokens``, or else one rank's share of a micro-batch; in layer order, of
        all micro-batches of a step.
        """
        return self.usage.tokens or self.micro_tokens * self.together

    @property
    def micro_tokens(self) -> int:
        """One rank's tokens in a micro-batch."""
        return rank_tokens(self.config, self.ranks)

    @property
    def together(self) -> int:
        """Micro-batches that pass through a layer together."""
        data = self.config.data
        return data.micro_batches // data.passes if self.usage.trains else 1

    @property
    def boundaries(self) -> BoundarySplit | None:
        """Where the block inputs of a step in layer order are kept; None if none are. Raises BudgetError."""
        if not self.usage.trains:
            return None
        return boundary_split(self.config, self.ranks, self.model.blocks)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one step or, if nothing is trained, in one forward pass."""
        if self.usage.trains:
            return self.config.tokens_per_step
        return self.tokens * self.ranks

    @property
    def layouts(self) -> list[UnitLayout]:
        """How the dense units are cut into slices."""
        compute, tables = self.config.model.compute_dtype, self.vocabulary.tables
        return flat_layouts(self.model.units, ranks=self.ranks, compute=compute, tables=tables)

    @property
    def vocabulary(self) -> VocabularyTables:
        """Whether the tables of embedding and head are gathered or partitioned, as a run would choose."""
        return choose_vocabulary(self.config, ranks=self.ranks, device=self.device)

    @property
    def fixed(self) -> FixedCost:
        """What one rank takes in addition to its budgets, as ``train`` announces it."""
        made = fixed_cost(
            self.config,
            self.process_bytes,
            ranks=self.ranks,
            device=self.device,
            units=self.model.units,
            text=min(self.text_bytes, self.config.data.max_bytes * len(self.config.data_by_task)),
        )
        if not self.usage.frozen:
            return made
        made = replace(made, dense=self._frozen_dense())
        spec = self.config.model
        if self.usage.trains or not isinstance(spec, HfSpec):
            return made
        return replace(made, activations=spec.forward_bytes(self.tokens), text=0)

    def _frozen_dense(self) -> DenseBytes:
        """Whole dense weights on every rank, and the state of attention's pairs, sliced over the ranks."""
        count = self.ranks
        width = self.config.model.compute_dtype.itemsize
        weights = sum(width * unit.matrices + 4 * unit.others for unit in self.model.units)
        pairs = sum(self.usage.attention)
        return DenseBytes(
            slices=weights + 16 * -(-pairs // count),
            fusion=4 * pairs if count > 1 else 0,
            gradients=8 * pairs if count > 1 else 0,
        )

    @property
    def schedule(self) -> Schedule:
        """The passes of one step over the units, in the trainer's order."""
        config = self.config
        return unit_schedule(
            self.layouts,
            config.dense,
            config.prefetch,
            moe_layers=self.model.moe_layers,
            compute=config.model.compute_dtype,
            micro_batches=config.data.passes,
            first_block=config.spec.layers.start,
        )


def setting_for(setting: Setting, use: Use, rank: int) -> Setting:
    """``setting`` with another use. Raises ConfigError if the model's store does not allow it."""
    spec = imported_spec(setting)
    if use is Use.FULL and spec.manifest.weights is Weights.FROZEN:
        raise ConfigError(
            f"{spec.directory}: its experts were imported frozen; --for: expected lora, lora-attention or serve"
        )
    return replace(setting, usage=usage_of(spec, use, rank, setting.config.adamw.moments))


def as_configured(setting: Setting) -> Setting:
    """``setting`` with the configured use: full training, or LoRA of a model or a stage. Raises ConfigError."""
    lora, spec = setting.config.lora, setting.config.model
    if not (lora.enabled and isinstance(spec, HfSpec)):
        return setting
    use = Use.LORA if lora.experts else Use.LORA_ATTENTION
    usage = usage_of(spec, use, lora.rank, setting.config.adamw.moments)
    return replace(setting, usage=replace(usage, attention=spec.own(usage.attention, 0)))


def imported_spec(setting: Setting) -> HfSpec:
    spec = setting.config.model
    if not isinstance(spec, HfSpec):
        raise ConfigError("--for, --lora: expected an imported model, got the built-in one")
    return spec


@dataclass(frozen=True)
class Capacity:
    """What one rank takes: ``terms``, and its budgets as ``divided``."""

    terms: tuple[Term, ...]
    divided: Budgets

    def total(self, *tiers: Tier) -> int:
        """Bytes on ``tiers``."""
        return sum(term.nbytes for term in self.terms if term.tier in tiers)

    def term(self, name: str) -> Term:
        """The term called ``name``. Raises KeyError."""
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(name)


def capacity(setting: Setting) -> Capacity:
    """Bytes of one rank on each tier. Raises BudgetError if the budgets are too small to start a run."""
    taken, memory = _capacity(setting), setting.device_memory
    if memory is None or setting.device is DeviceKind.CPU or setting.config.device_budget:
        return taken
    beside = taken.total(Tier.DEVICE) - taken.divided.device
    return _capacity(setting, free=memory - device_reserve(memory) - beside)


def _capacity(setting: Setting, free: int | None = None) -> Capacity:
    """``capacity`` with ``free`` bytes of an accelerator for experts (None: unknown)."""
    divided = budgets(
        setting.run_config,
        setting.device,
        experts=setting.records,
        schema=setting.schema,
        free=free,
        sums=setting.sums,
    )
    terms = [
        *_device_terms(setting, divided),
        *_host_terms(setting, divided),
        *_disk_terms(setting),
    ]
    return Capacity(tuple(term for term in terms if term.nbytes), divided)


def _dense_terms(setting: Setting) -> Iterable[Term]:
    """Slices of dense parameters, and buffers for whole ones."""
    config, model, ranks = setting.config, setting.model, setting.ranks
    layouts, on_cpu = setting.layouts, setting.device is DeviceKind.CPU
    dense = setting.fixed.dense
    on_host = config.dense.optimizer_state is not OptimizerState.DEVICE and not on_cpu
    own = sum(layout.slice_numel for layout in layouts)
    resident = 8 if config.dense.optimizer_state is OptimizerState.NVME else 16
    pairs = sum(setting.usage.attention)
    yield Term(
        Tier.HOST if on_host else Tier.DEVICE,
        "dense state",
        dense.slices,
        f"{model.dense} parameters in the compute type, and 1/{ranks} of 16 B x {pairs} of attention's pairs"
        if setting.usage.frozen
        else f"{resident} B x {own} parameters, the slices of 1/{ranks} of {model.dense}, padded",
    )
    if dense.staging:
        yield Term(
            Tier.HOST, "dense staging", dense.staging, "pinned, a slice of each fusion and gradient buffer"
        )
    yield Term(
        Tier.DEVICE,
        "fusion buffers",
        dense.fusion,
        f"embedding, head and {blocks_held(layouts, config.dense)} blocks gathered at once, whatever the depth"
        + (", and as much to send from" if gather_copies(ranks, setting.device.value) else ""),
    )
    yield Term(
        Tier.DEVICE,
        "gradient buffers",
        dense.gradients,
        f"8 B x {pairs} of attention's pairs"
        if setting.usage.frozen
        else f"4 B x 2 (own, received) x the larger of embedding and head, and {config.dense.gradient_buffers} blocks",
    )


def _device_terms(setting: Setting, divided: Budgets) -> Iterable[Term]:
    config, fixed, slots = setting.config, setting.fixed, divided.slots
    yield from _dense_terms(setting)
    yield Term(
        Tier.DEVICE,
        "expert slots",
        divided.device,
        f"{slots.weights} for weights x {slots.weight_bytes} B + {slots.gradients} for gradients x "
        f"{slots.gradient_bytes} B" + (", and as many for pairs" if setting.usage.pairs else ""),
    )
    if setting.usage.pairs is not None:
        numel = setting.usage.pairs.numel
        yield Term(
            Tier.DEVICE,
            "pairs of a pass",
            4 * (1 + setting.together) * numel * setting.local_experts,
            f"{4 * (1 + setting.together)} B (weights, gradients) x {numel} of each of {setting.local_experts} experts of "
            "a layer",
        )
    yield Term(
        Tier.DEVICE,
        "router copies",
        fixed.routers,
        "4 B x (experts + 1) x width for each MoE layer but the first, to predict experts",
    )
    yield Term(
        Tier.DEVICE,
        "activations",
        fixed.activations,
        f"upper estimate for a forward pass of {setting.tokens} tokens"
        if not setting.usage.trains
        else f"upper estimate for one block's graphs: {setting.together} micro-batches of {setting.micro_tokens} tokens"
        if config.data.layer_major
        else f"upper estimate for {setting.tokens} tokens, checkpoint_activations = "
        f"{config.model.checkpoint_activations.value}, expert_activations = "
        f"{config.model.expert_activations.value}",
    )


def _host_terms(setting: Setting, divided: Budgets) -> Iterable[Term]:
    fixed, spec = setting.fixed, setting.config.model
    if not setting.usage.trains and isinstance(spec, HfSpec):
        context = rank_tokens(setting.config, setting.ranks)
        yield Term(
            Tier.HOST if setting.device is DeviceKind.CPU else Tier.DEVICE,
            "keys and values",
            spec.cache_bytes(context),
            f"for {context} tokens, as transformers caches them",
        )
    kept = fixed.boundaries if setting.usage.trains else None
    if kept is not None:
        yield Term(
            Tier.HOST,
            "block inputs",
            kept.memory_bytes,
            f"{kept.slots} of {kept.count} x {kept.slot_bytes} B: {setting.together} micro-batches x "
            f"{setting.model.blocks} blocks" + (", boundary_budget" if kept.spilled_bytes else ""),
        )
    yield Term(
        Tier.HOST,
        "expert cache",
        divided.cache,
        "host_budget"
        + (" - expert slots" if setting.device is DeviceKind.CPU else "")
        + (" - gradient landing" if divided.landing else ""),
    )
    yield Term(
        Tier.HOST,
        "gradient landing",
        divided.landing,
        f"{divided.slots.host_buffers} buffers, part of host_budget",
    )
    if setting.device is not DeviceKind.CPU:
        own = sum(layout.slice_numel for layout in setting.layouts)
        if setting.usage.frozen:
            own = -(-sum(setting.usage.attention) // setting.ranks)
        yield Term(Tier.HOST, "dense staging", 12 * own, f"12 B x {own} parameters, for commits")
    yield Term(
        Tier.HOST,
        "process",
        fixed.process,
        "an interpreter with torch and its libraries",
        setting.process_evidence,
    )
    yield Term(Tier.HOST, "text", fixed.text, "the text files, at most data.max_bytes")
    yield Term(Tier.HOST, "working memory", fixed.working, "thread pools and fragmentation", Evidence.ASSUMED)


def _disk_terms(setting: Setting) -> Iterable[Term]:
    schema, retain = setting.schema, setting.config.retain
    slot_bytes = extent_bytes(schema, 1, 0) // schema_copies(schema, copies(0))  # padding included
    each = f"{schema.record_bytes / schema.numel:.4g}"
    of = f"x {copies(retain)} copies (the live one, the last commit's, {retain} snapshots)"
    once = "x 1 copy: read-only" if schema.frozen else of
    yield Term(
        Tier.NVME,
        "expert extents",
        extent_bytes(schema, setting.records, retain),
        f"{setting.records} records x {slot_bytes} B ({each} B x {schema.numel}, sections padded) {once}",
    )
    pairs = setting.usage.pairs
    if pairs is not None:
        yield Term(
            Tier.NVME,
            "pair extents",
            extent_bytes(pairs, setting.records, retain),
            f"{setting.records} records x {extent_bytes(pairs, 1, 0) // copies(0)} B "
            f"({pairs.record_bytes / pairs.numel:.4g} B x {pairs.numel}, sections padded) {of}",
        )
    dense = Counter(layout.slice_numel for layout in setting.layouts)
    slices = [
        (RecordSchema(f"dense-{numel}", numel, placement=Placement.DIRECT, training=setting.training), count)
        for numel, count in dense.items()
        if numel  # a pipeline stage has no embedding, or no head
    ]
    yield Term(
        Tier.NVME,
        "dense extents",
        sum(extent_bytes(one, count, retain) for one, count in slices),
        f"{4 if schema.frozen else 12} B x {sum(numel * count for numel, count in dense.items())} parameters of "
        f"{sum(dense.values())} units, padded, {once}",
    )
    adapters = -(-sum(setting.usage.attention) // setting.ranks)
    if adapters:
        yield Term(
            Tier.NVME,
            "attention's pairs",
            12 * adapters * copies(retain),
            f"12 B x {adapters} parameters {of}",
        )
    records = setting.records * len(setting.schemas) + sum(dense.values())
    yield Term(
        Tier.NVME, "index", index_bytes(records, retain), f"{records} entries, twice for LMDB's rewrites"
    )
    yield from _scratch_terms(setting)


def _scratch_terms(setting: Setting) -> Iterable[Term]:
    """What a step writes and reads back."""
    trained = setting.usage.pairs if setting.schema.frozen else setting.schema
    kept = setting.boundaries
    if kept is not None:
        yield Term(
            Tier.NVME,
            "block input scratch",
            kept.spilled_bytes,
            f"{kept.count - kept.slots} x {kept.slot_bytes} B, written and read once a step",
        )
    if setting.config.keeps_gradients and trained is not None and setting.usage.trains:
        yield Term(
            Tier.NVME,
            "gradient scratch",
            scratch_bytes(trained, setting.records),
            f"4 B x {trained.numel} of each of {setting.records} experts: clipping, or several passes a step",
        )
