"""The memory of a training run: an estimate of its fixed part, and the budgets that are left of ``memory``.

The fixed part is everything outside of the budgets: the interpreter with torch and its libraries, this rank's share of
the dense parameters and of the batch, the text. It does not depend on how many experts there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.capabilities import has_amx
from tierstore.dense.config import OptimizerState
from tierstore.dense.layout import DenseBytes, Gathered, Narrow, Region, Span, UnitLayout, dense_bytes
from tierstore.machine import MemoryAccount, working_bytes
from tierstore.model.architecture import DenseUnit
from tierstore.model.config import ComputeDtype, ModelConfig
from tierstore.model.vocabulary import EMBEDDING_PLACE, HEAD_PLACE
from tierstore.moe.config import tile_rows
from tierstore.parallel.layout import TableRows
from tierstore.prefetch.predictor import PredictorName
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import BoundarySplit, least_host_budget, pair_schema, split_boundaries
from tierstore.train.config import TrainConfig, assignment_of
from tierstore.train.files import text_bytes
from tierstore.train.tasks import own_head_tasks
from tierstore.train.vocabulary import choose_vocabulary

#: Machine code that oneDNN keeps for a bf16 product, for each shape: measured with AVX-512, whatever the width; with AMX it
#: grows with the width to 2 MiB (530 KiB at 256, 825 at 512, 1,240 at 1,024, 1,810 at 2,048, 1,910 at 4,096). Each row
#: count is another shape, and an expert's pass has six products.
_PRODUCT_BYTES = 650 << 10
_AMX_PRODUCT_BYTES, _AMX_WIDTH_BYTES, _AMX_MOST_BYTES = 300 << 10, 970, 2 << 20
_PRODUCTS = 6
#: The most shapes that it keeps (ONEDNN_PRIMITIVE_CACHE_CAPACITY).
_PRODUCT_SHAPES = 1024


@dataclass(frozen=True)
class FixedCost:
    """Memory of one rank outside of its budgets, in bytes, by part, on the host and on the device."""

    process: int
    dense: DenseBytes
    activations: int
    text: int
    working: int = 0
    pairs: int = 0  # of a layer's experts during a pass
    boundaries: BoundarySplit | None = None  # block inputs of a step in layer order
    routers: int = 0  # copies, for guessing
    tokenising: int = 0  # before anything but the process is in memory

    @property
    def nbytes(self) -> int:
        passes = self.activations + self.pairs + self.boundary_bytes
        return self.process + self.dense.total + passes + self.text + self.working + self.routers

    @property
    def boundary_bytes(self) -> int:
        """Block inputs that stay in memory."""
        return 0 if self.boundaries is None else self.boundaries.memory_bytes

    def device_bytes(self, config: TrainConfig) -> int:
        """The bytes of these that are in an accelerator's memory."""
        return self._dense_on_device(config) + self.activations + self.pairs + self.routers

    def _dense_on_device(self, config: TrainConfig) -> int:
        with_slices = config.dense.optimizer_state is OptimizerState.DEVICE or config.lora.enabled
        return self.dense.fusion + self.dense.gradients + (self.dense.slices if with_slices else 0)

    def account(self, config: TrainConfig, device: DeviceKind) -> MemoryAccount:
        """What the process will hold in host memory, with the experts' budget."""
        of_passes = {
            "activations": self.activations,
            "pairs of a pass": self.pairs,
            "router copies": self.routers,
        }
        on_host = device is DeviceKind.CPU
        parts = {
            "experts": config.host_budget,
            "process": self.process,
            "dense parameters": self.dense.total - (0 if on_host else self._dense_on_device(config)),
            **(of_passes if on_host else {}),
            "block inputs": self.boundary_bytes,
            "text": self.text,
            "working memory": self.working,
        }
        later = sum(parts.values()) - self.process
        return MemoryAccount(parts | {"tokenising": max(self.tokenising - later, 0)})


def flat_layouts(
    units: Sequence[DenseUnit],
    *,
    ranks: int,
    compute: ComputeDtype,
    tables: Mapping[tuple[str, int], TableRows] | None = None,
) -> list[UnitLayout]:
    """The slices for ``ranks`` ranks of parameter groups of which only the counts are known: each region as if it were
    one parameter.

    ``tables``: embedding and head, by position, if each rank keeps its rows of them.
    """
    divided = {name: table for (name, _), table in (tables or {}).items()}
    by_group = {0: divided.get(EMBEDDING_PLACE[0]), len(units) - 1: divided.get(HEAD_PLACE[0])}

    def regions(number: int, unit: DenseUnit) -> Iterator[Region]:
        table = by_group.get(number)
        others = unit.others - (0 if table is None else table.rows * table.width)
        if compute is ComputeDtype.BF16:
            counts = [(Narrow.NO, others), (Narrow.YES, unit.matrices)]
        else:
            counts = [(Narrow.NO, others + unit.matrices)]
        for narrow, numel in counts:
            if numel:
                yield Region((Span(0, 0, (numel,)),), ranks, narrow)
        if table is not None:
            whole = Span(1, 0, (table.rows, table.width))
            yield Region((whole,), ranks, Narrow.NO, Gathered.NO)

    return [UnitLayout(f"unit {number}", tuple(regions(number, unit))) for number, unit in enumerate(units)]


def fixed_cost(
    config: TrainConfig,
    process: int,
    *,
    ranks: int = 1,
    device: DeviceKind = DeviceKind.CPU,
    units: Sequence[DenseUnit] | None = None,
    text: int | None = None,
    tokenising: int = 0,
) -> FixedCost:
    """The fixed cost of one of ``ranks`` ranks whose process holds ``process`` bytes after its imports.

    ``units`` and ``text``: the dense parameters and bytes of text (None: those of the configuration). ``tokenising``: bytes
    that are taken, and free again, before anything but the process is in memory.
    Raises DataError, BudgetError.
    """
    units = with_heads(config, config.model.architecture.units if units is None else units)
    activations = _activations(config, rank_tokens(config, ranks))
    return FixedCost(
        process=process,
        dense=_dense(config, ranks, device, units),
        activations=activations,
        boundaries=boundary_split(config, ranks, len(units) - 2),
        text=_texts(config) if text is None else text,
        working=_working_bytes(config, activations, device),
        pairs=_pass_bytes(config, ranks),
        routers=router_bytes(config),
        tokenising=tokenising,
    )


def with_heads(config: TrainConfig, units: Sequence[DenseUnit]) -> Sequence[DenseUnit]:
    """``units`` with the tasks' own output heads added to the last one."""
    more = len(own_head_tasks(config.tasks)) * config.model.vocab_size * config.model.d_model
    return [*units[:-1], replace(units[-1], others=units[-1].others + more)] if more else units


def router_bytes(config: TrainConfig) -> int:
    """Bytes of the copies of routers and norms that guess, of all MoE layers but the first: at most, in fp32."""
    model, prefetch = config.model, config.prefetch
    if prefetch.predictor is not PredictorName.ROUTER or not prefetch.depth:
        return 0
    return 4 * len(model.moe_layers[1:]) * (model.experts + 1) * model.expert_shape.d_model


def _dense(config: TrainConfig, ranks: int, device: DeviceKind, units: Sequence[DenseUnit]) -> DenseBytes:
    """Bytes of dense parameters; with LoRA, of the frozen ones, whole in their types, and the state of attention's pairs."""
    compute, lora = config.model.compute_dtype, config.lora.enabled
    trained = [DenseUnit(matrices=0, others=count) for count in config.spec.adapter_units] if lora else units
    tables = choose_vocabulary(config, ranks=ranks, device=device).tables
    dense = dense_bytes(
        flat_layouts(trained, ranks=ranks, compute=compute, tables=tables),
        config.dense,
        ranks=ranks,
        compute=compute,
        device_type=device.value,
    )
    if not lora:
        return dense
    frozen = sum(compute.itemsize * unit.matrices + 4 * unit.others for unit in units)
    return replace(dense, slices=dense.slices + frozen)


def _activations(config: TrainConfig, tokens: int) -> int:
    if config.data.layer_major:
        return config.spec.layer_order_bytes(tokens, config.data.micro_batches)
    return config.spec.activation_bytes(tokens)


def boundary_split(config: TrainConfig, ranks: int, blocks: int) -> BoundarySplit | None:
    """The split of a step's block inputs on one of ``ranks`` ranks; None if none are kept. Raises BudgetError."""
    if not config.data.layer_major:
        return None
    each = rank_tokens(config, ranks) * config.model.d_model * config.model.compute_dtype.itemsize
    return split_boundaries(blocks, config.data.micro_batches, each, config.boundary_budget)


def within_memory(
    config: TrainConfig, fixed: FixedCost, device: DeviceKind, *, sums: bool = False
) -> TrainConfig:
    """``config`` with the budgets that ``memory`` leaves beside ``fixed``, as far as they are not given: the host budget,
    and ``boundary_budget`` if block inputs would take more than half of what is left. They change no bit.

    Raises BudgetError if ``memory`` is too small; it names what would fit.
    """
    if not config.memory:
        return config
    least = config.host_budget or least_host_budget(config, device, sums=sums)
    boundaries, boundary_budget = fixed.boundaries, config.boundary_budget
    if boundaries is not None and not boundary_budget:
        alone = (
            replace(fixed, boundaries=None, tokenising=0)
            .account(replace(config, host_budget=least), device)
            .nbytes
        )
        half, one_block = (config.memory - alone) // 2, config.data.micro_batches * boundaries.slot_bytes
        if boundaries.memory_bytes > half:
            boundary_budget = max(half, one_block)
            slots = boundary_budget // boundaries.slot_bytes
            fixed = replace(fixed, boundaries=replace(boundaries, slots=slots))
    account = fixed.account(replace(config, host_budget=least), device)
    account.check(
        config.memory, "data.batch_size, or recompute activations (model.checkpoint_activations = block)"
    )
    left = config.memory - account.nbytes + account.parts["tokenising"]
    host_budget = config.host_budget or left + least
    return replace(config, host_budget=host_budget, boundary_budget=boundary_budget)


def _pass_bytes(config: TrainConfig, ranks: int) -> int:
    """Bytes that a pass keeps for the pairs of a layer's experts: weights, and gradients of each of its micro-batches."""
    pairs = pair_schema(config)
    sharing = config.parallel.expert or ranks
    together = config.data.micro_batches // config.data.passes
    return 0 if pairs is None else 4 * (1 + together) * pairs.numel * -(-config.model.experts // sharing)


def _working_bytes(config: TrainConfig, activations: int, device: DeviceKind) -> int:
    """Memory beside that of any one part; ``activations`` are on ``device``."""
    if device is not DeviceKind.CPU:
        return working_bytes(0)
    products = product_bytes(config, device)
    compiling = products > 0 and has_amx()
    return working_bytes(activations, together=config.data.layer_major, compiling=compiling) + products


def product_bytes(config: TrainConfig, device: DeviceKind) -> int:
    """Bytes that torch keeps for the experts' products: an estimate, for row counts up to four times an expert's mean."""
    model = config.model
    if not model.moe_layers or model.compute_dtype is not ComputeDtype.BF16 or device is not DeviceKind.CPU:
        return 0
    tokens = rank_tokens(config, 1)  # an expert's rows come from the ranks of its group
    counts = min(tokens, -(-4 * tokens * model.architecture.top_k // model.experts))
    each = _PRODUCT_BYTES
    if has_amx():
        if isinstance(model, ModelConfig):  # whose experts' rows are padded
            counts = len({tile_rows(rows) for rows in range(1, counts + 1)})
        each = min(_AMX_PRODUCT_BYTES + _AMX_WIDTH_BYTES * model.expert_shape.d_model, _AMX_MOST_BYTES)
    return min(_PRODUCTS * counts, _PRODUCT_SHAPES) * each


def rank_tokens(config: TrainConfig, ranks: int) -> int:
    """Tokens of one micro-batch on one of ``ranks`` ranks, which share a batch."""
    if config.tasks:
        return assignment_of(config, ranks).most_rows * config.model.seq_len
    return -(-config.tokens_per_micro_batch // ranks)


def _texts(config: TrainConfig) -> int:
    return sum(text_bytes(data, config.spec.tokenizer) for data in config.data_by_task.values())
