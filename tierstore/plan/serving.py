"""What serving a model takes and how fast it is, by the memory that its experts get. Imports no torch.

For each budget, a prefill pass and a decode pass are predicted. Bytes come from a decode trace (``tierstore generate
--record-trace``), replayed through the residency core with that budget, or without one from even routing: a pass of T tokens
reaches d(T) = E (1 - (1 - k / E)^T) experts of a layer, and the part that the budget holds is in memory.

Time: a layer's experts that are in memory are computed while the others are read, so a pass takes

    dense_s + layers x max(compute_s of its experts, read_s of those that are missing)

Computing takes the longer of its floating point operations and of reading its weights from memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import ConfigError, DataError
from tierstore.hf.sizes import cache_bytes
from tierstore.hf.spec import HfSpec
from tierstore.machine_profile import Evidence, Profile
from tierstore.plan.ring import distinct_experts
from tierstore.store.format import Group
from tierstore.trace.reader import read_header
from tierstore.trace.replay import STEP_COUNTS, replay_steps
from tierstore.train.budgets import expert_weight_bytes

#: Budgets that are planned where none are given, as parts of all experts.
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
_HITS, _MISSES, _READ = (STEP_COUNTS.index(name) for name in ("hits", "misses", "read_bytes"))


@dataclass(frozen=True, kw_only=True)
class ServedWork:
    """What is served: ``sequences`` together, prompts of ``prompt_tokens``, up to ``context`` tokens of each. ``trace``:
    of a run with as many sequences. Raises ConfigError.
    """

    sequences: int = 1
    prompt_tokens: int = 32
    context: int = 4096
    trace: Path | None = None

    def __post_init__(self) -> None:
        for name in ("sequences", "prompt_tokens", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """A forward pass: what it asks for (experts, over all layers), reads from disk, and takes."""

    asked: float
    missed: float
    read_bytes: float
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class BudgetPlan:
    """One budget for experts. ``prefill`` is None where a trace has no prefill."""

    host_budget: int
    share: float
    prefill: PassPlan | None
    decode: PassPlan


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """Every budget; and memory beside the experts: dense parameters, keys and values, the process. ``missed_records``: of a
    training store, which are read whole and replayed before they are served (None: not a store).
    """

    budgets: tuple[BudgetPlan, ...]
    expert_bytes: int
    dense: int
    keys_and_values: int
    process: int
    missed_records: int | None
    evidence: Evidence
    machine: str

    def as_json(self) -> dict[str, Any]:
        """Numbers by keys that say their unit."""
        return {
            "budgets": [
                {
                    "host_budget_bytes": one.host_budget,
                    "experts_ratio": one.share,
                    "memory_bytes": self.memory(one),
                    "prefill": _pass_json(one.prefill),
                    "decode": _pass_json(one.decode),
                }
                for one in self.budgets
            ],
            "expert_bytes": self.expert_bytes,
            "dense_bytes": self.dense,
            "keys_and_values_bytes": self.keys_and_values,
            "process_bytes": self.process,
            "missed_records_count": self.missed_records,
            "evidence": self.evidence.value,
            "machine": self.machine,
        }

    def memory(self, one: BudgetPlan) -> int:
        """Of the whole process with that budget."""
        return one.host_budget + self.dense + self.keys_and_values + self.process


def _pass_json(made: PassPlan | None) -> dict[str, float] | None:
    if made is None:
        return None
    return {
        "asked_count": made.asked,
        "missed_count": made.missed,
        "read_bytes": made.read_bytes,
        "pass_s": made.seconds,
        "tokens_per_s": made.tokens_per_s,
    }


def plan_serving(
    spec: HfSpec,
    work: ServedWork,
    profile: Profile,
    *,
    budgets: Sequence[int] = (),
    missed_records: int | None = None,
) -> ServingPlan:
    """The plan of ``spec`` for ``budgets`` (bytes for experts; default: ``SHARES`` of them all).

    Raises ConfigError (a budget below one pass's experts of a layer), DataError for a trace of another model.
    """
    model = spec.architecture
    each = expert_weight_bytes(spec)
    count = model.experts * len(model.moe_layers)
    chosen = budgets or [round(share * count) * each for share in SHARES]
    evidence = Evidence.ASSUMED if work.trace is None else Evidence.FORMULA
    made = []
    for budget in chosen:
        held = budget // each
        if held < 1:
            raise ConfigError(f"--budgets: {budget} bytes hold no expert, which takes {each}")
        passes = (
            _even(model, work, held, count, each)
            if work.trace is None
            else replayed_passes(work.trace, held, sequences=work.sequences, top_k=model.top_k)
        )
        prefill, decode = passes
        if decode is None:
            raise DataError(f"{work.trace}: has no decode pass of {work.sequences} sequences")
        prompt = work.sequences * work.prompt_tokens
        made.append(
            BudgetPlan(
                host_budget=budget,
                share=min(held / count, 1.0),
                prefill=None if prefill is None else _timed(spec, prefill, prompt, profile),
                decode=_timed(spec, decode, work.sequences, profile),
            )
        )
    return ServingPlan(
        budgets=tuple(made),
        expert_bytes=each,
        dense=sum(spec.compute_dtype.itemsize * unit.matrices + 4 * unit.others for unit in model.units),
        keys_and_values=cache_bytes(spec, work.sequences * work.context),
        process=profile.process_bytes,
        missed_records=missed_records,
        evidence=profile.evidence.weaker(evidence),
        machine=profile.machine,
    )


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Means of one pass: experts asked for, missed, and bytes read."""

    asked: float
    missed: float
    read_bytes: float


def _even(model: Any, work: ServedWork, held: int, count: int, each: int) -> tuple[PassCounts, PassCounts]:
    def one(tokens: int) -> PassCounts:
        asked = len(model.moe_layers) * distinct_experts(model.experts, model.top_k, tokens)
        missed = asked * (1.0 - min(held / count, 1.0))
        return PassCounts(asked, missed, missed * each)

    return one(work.sequences * work.prompt_tokens), one(work.sequences)


def replayed_passes(
    trace: Path, held: int, *, sequences: int, top_k: int
) -> tuple[PassCounts | None, PassCounts | None]:
    """The mean prefill and decode pass of ``trace`` with memory for ``held`` experts: a pass that asks for more experts of
    its layers than ``sequences`` tokens can choose is a prefill.

    Raises DataError, BudgetError (an access needs more), OSError.
    """
    with trace.open("rb") as file:
        header = read_header(file)
    table = header.table
    layers = len(np.unique(table.layers))
    frames = int(table.frames[:, Group.WEIGHTS].max(initial=0))
    if not frames:
        raise DataError(f"{trace}: its records have no weights")
    share = header.lookahead_frames / header.capacity_frames
    capacity = held * frames
    counts = replay_steps(
        trace,
        policy=header.policy,
        policy_options=header.policy_options,
        capacity_frames=capacity,
        lookahead_frames=int(share * capacity),
    )
    counts = counts[counts[:, _HITS] + counts[:, _MISSES] > 0]
    asked = counts[:, _HITS] + counts[:, _MISSES]
    prefill = asked > sequences * top_k * layers
    return _mean(counts[prefill]), _mean(counts[~prefill])


def _mean(counts: np.ndarray[Any, np.dtype[np.int64]]) -> PassCounts | None:
    if not len(counts):
        return None
    hits, misses, read = (float(counts[:, column].mean()) for column in (_HITS, _MISSES, _READ))
    return PassCounts(hits + misses, misses, read)


def _timed(spec: HfSpec, counts: PassCounts, tokens: int, profile: Profile) -> PassPlan:
    model, width = spec.architecture, spec.compute_dtype.itemsize
    layers, expert_bytes = len(model.moe_layers), expert_weight_bytes(spec)
    dense_s = max(
        profile.dense_flops.seconds(2.0 * model.dense * tokens), model.dense * width / profile.copy.per_s
    )
    compute_s = max(
        2.0 * model.expert_numel * model.top_k * tokens / profile.expert_flops.per_s,
        counts.asked / layers * expert_bytes / profile.copy.per_s,
    )
    reads = counts.read_bytes / layers / expert_bytes  # ahead or on demand, a latency each
    read_s = reads * profile.disk_read.seconds(expert_bytes)
    seconds = dense_s + layers * max(compute_s, read_s)
    return PassPlan(
        asked=counts.asked,
        missed=counts.missed,
        read_bytes=counts.read_bytes,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
    )
