"""Predict the memory and the speed of serving a model, for different expert budgets. Imports no torch.

For each budget, a prefill pass and a decode pass are predicted. Budgets are divided as in a server (``ExpertBudget``).
The bytes read come from a trace (``tierstore generate --record-trace``), replayed through the residency core with the frames
left for the cache: with the budget and the settings of the recorded run, the counts are those of the run. Without a trace,
even routing is assumed: a pass of T tokens reaches d(T) = E (1 - (1 - k / E)^T) experts of a layer. Those that no slot of
the device holds are copied to it, from the host cache if that holds them, else from disk. With a trace of a run that had
device slots, all that it requested of its host cache are copied; of a run that computed in the host cache, the share of
its requests that the slots cannot hold.

Time: a layer's experts that are ready are computed while others are copied and read, so a pass takes

    dense_s + layers x max(compute_s of its experts, copy_s of those that no slot holds, read_s of those that are missing)

Computing takes as long as its floating point operations; on a CPU at least as long as reading its weights from memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.accelerator import device_reserve
from tierstore.cache.frames import frames_of
from tierstore.config import check_least
from tierstore.errors import BudgetError, ConfigError, DataError
from tierstore.hf.describing import cached_positions
from tierstore.hf.spec import HfSpec
from tierstore.machine_profile import Cost, Evidence, Profile, over_link
from tierstore.model.store_schema import expert_record, expert_weight_bytes, quantized_layout
from tierstore.plan.papers import distinct_experts
from tierstore.serve.config import ServeConfig
from tierstore.serve.footprint import (
    ExpertBudget,
    ServedBudgets,
    ServedRecords,
    batch_bytes,
    copies_weights,
    dense_parameter_bytes,
)
from tierstore.store.config import StoreAccess
from tierstore.store.format import Group, Training
from tierstore.store.opening import cache_frames
from tierstore.tiers.slots import DeviceKind
from tierstore.trace.files import read_header
from tierstore.trace.replay import STEP_COUNTS, quotas_by_layer, replay_steps
from tierstore.units import format_bytes

if TYPE_CHECKING:  # it imports torch
    from tierstore.serve.opening import ServedStore

#: The default budgets, as shares of all experts.
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
#: The default context in tokens.
_CONTEXT = 4096
_HITS, _MISSES, _READ = (STEP_COUNTS.index(name) for name in ("hits", "misses", "read_bytes"))


@dataclass(frozen=True, kw_only=True)
class ServedWork:
    """What is served: ``sequences`` together, prompts of ``prompt_tokens``, up to ``context`` tokens each (0: 4096, or the
    model's limit if that is less). ``trace``: that of a run with as many sequences. Raises ConfigError.
    """

    sequences: int = 1
    prompt_tokens: int = 32
    context: int = 0
    trace: Path | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "sequences", "prompt_tokens")
        check_least(self, 0, "context")

    def of(self, spec: HfSpec) -> ServedWork:
        """A copy with the context set for ``spec``. Raises ConfigError if the model allows less than was asked for."""
        most = cached_positions(spec.config) or max(_CONTEXT, self.context, self.prompt_tokens)
        for name in ("prompt_tokens", "context"):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{name}: expected at most {most}, the model's own limit, got {getattr(self, name)}"
                )
        return replace(self, context=self.context or min(most, max(_CONTEXT, self.prompt_tokens)))


@dataclass(frozen=True)
class PassPlan:
    """A forward pass: experts that it requests over all layers (of a trace: of the host cache), those that are copied to the
    device, those that are not in memory, bytes read, and time. ``passes_count``: number of recorded passes of which this is
    the mean (0: none was recorded).
    """

    passes_count: int
    asked_count: float
    copied_count: float
    missed_count: float
    read_bytes: float
    pass_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class BudgetPlan:
    """The plan of one expert budget. ``slots_count``: experts that the device holds (0: a CPU computes with them in the host
    cache). ``memory_bytes``: of the whole process. ``prefill``: None if a trace has no prefill.
    """

    host_budget_bytes: int
    experts_ratio: float
    slots_count: int
    memory_bytes: int
    prefill: PassPlan | None
    decode: PassPlan


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """Plans of all budgets, and memory beside the experts: dense parameters, keys and values of ``context_tokens_count``
    tokens of each sequence, the process. ``missed_records_count``: records of a training store that have missed steps, and
    so are read whole and replayed (None: not a store).
    """

    budgets: tuple[BudgetPlan, ...]
    expert_bytes: int
    dense_bytes: int
    context_tokens_count: int
    keys_and_values_bytes: int
    process_bytes: int
    missed_records_count: int | None
    evidence: Evidence
    machine: str


@dataclass(frozen=True, slots=True)
class _Cache:
    """The host cache of a server, in frames: all of them, the most for speculation, and those of one expert."""

    frames: int
    lookahead_frames: int
    expert_frames: int


#: The number of passes, and the means of experts requested, copied and missed, and bytes read.
_Counts = tuple[int, float, float, float, float]


def plan_serving(
    spec: HfSpec,
    work: ServedWork,
    profile: Profile,
    *,
    budgets: Sequence[int] = (),
    config: ServeConfig | None = None,
    device: DeviceKind = DeviceKind.CPU,
    device_memory: int | None = None,
    stored: ServedStore | None = None,
) -> ServingPlan:
    """Plan serving ``spec`` with ``budgets`` (bytes for experts; default: such that the cache holds ``SHARES`` of them all).

    ``config``: how it is served; its budget and batch are not used. ``device_memory``: bytes of an accelerator (None: not
    known; experts then get a few slots unless ``device_budget`` is set). ``stored``: its store; without it, all are frozen.
    Raises ConfigError, BudgetError (a budget that a server refuses, a device that is too small), DataError for a trace of
    another model.
    """
    work, config = work.of(spec), config or ServeConfig()
    profile = replace(profile, disk_read=over_link(profile.disk_read, config.links.disk))
    link = over_link(profile.copy, config.links.copy)
    if stored is None:
        numel, quantized = spec.expert_shape.numel, quantized_layout(spec)
        experts = expert_record(numel, spec.compute_dtype, Training.FROZEN, quantized=quantized)
        records = ServedRecords(experts=experts)
    else:
        records = stored.records

    on_host, copied = device is DeviceKind.CPU, copies_weights(config, device)
    dense = dense_parameter_bytes(spec)
    keys_and_values = batch_bytes(spec, work.sequences, work.context)
    free = None
    if device_memory is not None and not on_host:
        free = device_memory - device_reserve(device_memory) - dense - keys_and_values

    def cache_of(given: ServedBudgets) -> _Cache:
        frames, frame = cache_frames(given.cache - records.scratch, records.schemas, StoreAccess.READ)
        each = frames_of([part.nbytes for part in records.experts.layout(Group.WEIGHTS).sections], frame)
        return _Cache(frames, min(given.lookahead // frame, frames), each)

    served = ExpertBudget(config=config, spec=spec, records=records, device=device)
    count = spec.experts * len(spec.moe_layers)
    if not budgets:
        budgets = [served.full(share) for share in SHARES]
    made = []
    for budget in budgets:
        try:
            given = served.of(budget).divided(free=free)
            cache = cache_of(given)
        except BudgetError as error:
            raise BudgetError(f"--budgets: {error}") from error
        held = given.slots.nbytes + (0 if given.pairs is None else given.pairs.nbytes)
        if free is not None and held > free:
            raise BudgetError(
                f"--device-memory: {device_memory} bytes cannot hold {format_bytes(held)} of experts beside "
                f"{format_bytes(dense)} of dense parameters, {format_bytes(keys_and_values)} of keys and values and a "
                "reserve of a tenth; lower device_budget, --batch or --context"
            )
        share = min(cache.frames // cache.expert_frames / count, 1.0)
        slots = min(given.slots.weights, count) if copied else 0
        in_slots = slots / count if copied else None
        prefill, decode = (
            _even(spec, work, share, in_slots)
            if work.trace is None
            else _replayed(work.trace, cache, work.sequences, spec, in_slots)
        )
        prompt = work.sequences * work.prompt_tokens
        made.append(
            BudgetPlan(
                budget,
                share,
                slots,
                budget + (dense + keys_and_values if on_host else 0) + profile.process_bytes,
                None if prefill is None else _timed(spec, prefill, prompt, profile, link, device),
                _timed(spec, decode, work.sequences, profile, link, device),
            )
        )
    evidence = Evidence.ASSUMED if work.trace is None else Evidence.FORMULA
    return ServingPlan(
        budgets=tuple(made),
        expert_bytes=expert_weight_bytes(spec),
        dense_bytes=dense,
        context_tokens_count=work.context,
        keys_and_values_bytes=keys_and_values,
        process_bytes=profile.process_bytes,
        missed_records_count=None if stored is None else stored.missed_records,
        evidence=profile.evidence.weaker(evidence),
        machine=profile.machine,
    )


def _even(spec: HfSpec, work: ServedWork, held: float, in_slots: float | None) -> tuple[_Counts, _Counts]:
    """The prefill and decode pass. ``held``, ``in_slots``: shares of all experts that the host cache and the device's slots
    hold (None: nothing is copied).
    """
    model, each = spec.architecture, expert_weight_bytes(spec)

    def one(tokens: int) -> _Counts:
        asked = len(model.moe_layers) * distinct_experts(model.experts, model.top_k, tokens)
        copied = 0.0 if in_slots is None else asked * (1.0 - in_slots)
        missed = (asked if in_slots is None else copied) * (1.0 - held)
        return 0, asked, copied, missed, missed * each

    return one(work.sequences * work.prompt_tokens), one(work.sequences)


def _replayed(
    trace: Path, cache: _Cache, sequences: int, spec: HfSpec, in_slots: float | None
) -> tuple[_Counts | None, _Counts]:
    """The mean prefill and decode pass of ``trace`` with ``cache``: a pass that requests more records than ``sequences``
    tokens can choose is a prefill. ``in_slots``: as of ``_even``.

    Raises DataError, BudgetError (an access needs a larger cache), OSError.
    """
    with trace.open("rb") as file:
        header = read_header(file)
    table, layers = header.table, np.unique(header.table.layers).tolist()
    # Kinds of records: 1 for experts, 2 with their LoRA pairs.
    kinds, more = divmod(len(table), spec.experts * len(spec.moe_layers))
    if more or layers != list(spec.moe_layers) or cache.expert_frames not in table.frames[:, Group.WEIGHTS]:
        raise DataError(f"{trace}: its records are not the experts of this model")
    quotas = [header.layer_quotas[layer] for layer in layers] if header.layer_quotas else []
    replayed = replace(
        header,
        capacity_frames=cache.frames,
        lookahead_frames=cache.lookahead_frames,
        layer_quotas=tuple(quotas_by_layer(layers, cache.frames, quotas)) if quotas else (),
    )
    counts = replay_steps(trace, replayed)
    asked = counts[:, _HITS] + counts[:, _MISSES]
    first = int(np.argmax(asked > 0))  # requests while the store opened are not a pass
    asked, counts = asked[first:], counts[first:]
    decode = asked <= sequences * spec.top_k * len(layers) * kinds
    if len(asked) > 1 and not decode.any():
        decode = asked == len(table)  # with a ring every pass requests whole layers
    if not decode.any():
        raise DataError(f"{trace}: has no decode pass of {sequences} sequences")
    # What a device's slots held was not requested of the recorded host cache.
    copied = 0.0 if in_slots is None else 1.0 if header.slot_traces else 1.0 - in_slots
    return None if decode.all() else _mean(counts[~decode], copied), _mean(counts[decode], copied)


def _mean(counts: np.ndarray[Any, np.dtype[np.int64]], copied: float) -> _Counts:
    """``copied``: the share of the requests that is copied to a device."""
    hits, misses, read = (float(counts[:, column].mean()) for column in (_HITS, _MISSES, _READ))
    return len(counts), hits + misses, copied * (hits + misses), misses, read


def _timed(
    spec: HfSpec, counts: _Counts, tokens: int, profile: Profile, link: Cost, device: DeviceKind
) -> PassPlan:
    """``link``: the cost of copies to the device."""
    passes, asked, copied, missed, read_bytes = counts
    model, width = spec.architecture, spec.compute_dtype.itemsize
    layers, expert_bytes = len(model.moe_layers), expert_weight_bytes(spec)
    dense_s = profile.dense_flops.seconds(2.0 * model.dense * tokens)
    compute_s = 2.0 * model.expert_numel * model.top_k * tokens / profile.expert_flops.per_s
    if device is DeviceKind.CPU:
        dense_s = max(dense_s, model.dense * width / profile.copy.per_s)
        compute_s = max(compute_s, asked / layers * expert_bytes / profile.copy.per_s)
    copy_s = copied / layers * link.seconds(expert_bytes)
    reads = read_bytes / layers / expert_bytes  # ahead or on demand, each with a latency
    read_s = reads * profile.disk_read.seconds(expert_bytes)
    seconds = dense_s + layers * max(compute_s, copy_s, read_s)
    return PassPlan(passes, asked, copied, missed, read_bytes, seconds, tokens / seconds)
