"""Traffic for ``bench tiers``, and its effect on a store: concurrent fetches, optimizer steps, commits beside fetches.

A step of a trace fetches the weights of the records of each forward access, one fetch per access, several in flight;
then steps the records that the trace leaves dirty, or the fraction of them given by the dirty ratio. A commit runs beside
the fetches of the step after it, as in training.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.bench.probes import process_bytes, usage
from tierstore.bench.soak_plan import StoreModel
from tierstore.cache.access import Phase
from tierstore.lab.generators import RoutingWorkload, in_memory
from tierstore.lab.requests import Requests, load_requests, trace_requests
from tierstore.lab.routing import Sections
from tierstore.store import Group, ParameterStore

_STEPS = 64
_MANY_RECORDS = 64
_GRADIENT_GROUP = 2
_MOST_TRACE_REQUESTS = 1 << 21
_SNAPSHOT_EVERY = 4  # commits
_GREATEST = ("disk_bytes", "needed_copies")


@dataclass(frozen=True)
class TrafficStep:
    """The records of each access of a forward pass, and those that the optimizer steps; each ascending."""

    fetches: tuple[tuple[int, ...], ...]
    stepped: tuple[int, ...]


@dataclass(frozen=True)
class TierTraffic:
    """Steps over records numbered from 0, with layers ``layers``."""

    name: str
    layers: tuple[int, ...]
    steps: tuple[TrafficStep, ...]

    @staticmethod
    def of(requests: Requests) -> TierTraffic:
        """The traffic of ``requests``, without gradients: the store has its own."""
        kept = requests.table.groups != _GRADIENT_GROUP
        known, numbers = np.unique(requests.table.records[kept], return_inverse=True)
        number = np.zeros(len(requests.table.records), np.int64)
        number[kept] = numbers
        layers = np.zeros(len(known), np.int64)
        layers[number[kept]] = requests.table.layers[kept]
        steps: list[list[tuple[int, ...]]] = [[] for _ in range(requests.step_count)]
        stepped: list[set[int]] = [set() for _ in range(requests.step_count)]
        for event in range(requests.events):
            asked = slice(int(requests.offsets[event]), int(requests.offsets[event + 1]))
            entries = requests.entries[asked]
            entries, writes = entries[kept[entries]], requests.writes[asked][kept[entries]]
            step = int(requests.steps[event])
            changed = number[entries[writes != 0]].tolist()
            stepped[step].update(changed)
            if requests.phases[event] not in (Phase.BACKWARD, Phase.OPTIMIZER) and len(entries):
                steps[step].append(tuple(np.unique(number[entries]).tolist()))
        return TierTraffic(
            requests.name,
            tuple(layers.tolist()),
            tuple(
                TrafficStep(tuple(fetches), tuple(sorted(dirty)))
                for fetches, dirty in zip(steps, stepped, strict=True)
                if fetches or dirty
            ),
        )


def synthetic(records: int, seed: int) -> TierTraffic:
    """Training of a router over about ``records`` experts: skewed, with some persistence from token to token."""
    layers = 4 if records >= _MANY_RECORDS else 2
    experts = max(records // layers, 2)
    workload = RoutingWorkload(
        layers=layers,
        experts=experts,
        k=2 if experts > 2 else 1,
        tokens_per_step=max(experts // 8, 1),
        steps=_STEPS,
        skew=0.8,
        persistence=0.3,
        sections=Sections.SPLIT,
        seed=seed,
    )
    return TierTraffic.of(trace_requests(in_memory(workload), name="synthetic routing"))


def recorded(path: Path) -> TierTraffic:
    """The traffic of the trace at ``path``. Raises DataError, OSError."""
    return TierTraffic.of(load_requests(path).head(_MOST_TRACE_REQUESTS))


def partly_dirty(steps: Sequence[TrafficStep], ratio: float, seed: int) -> Iterator[TrafficStep]:
    """Repeat ``steps``; each stepped record is kept with probability ``ratio``."""
    rng = np.random.default_rng(seed)
    for step in cycle(steps):
        chosen = np.array(step.stepped, np.int64)
        kept = chosen[rng.random(len(chosen)) < ratio]
        yield TrafficStep(step.fetches, tuple(kept.tolist()))


# The load ---------------------------------------------------------------------------------------------------


@dataclass
class TierLoadResult:
    """What was done in ``elapsed_s``, from one commit to another. ``disk_bytes`` and ``needed_copies`` (of records) are
    the greatest observed.
    """

    elapsed_s: float = 0.0
    steps: int = 0
    commits: int = 0
    fetched_bytes: int = 0
    changed_bytes: int = 0
    dirty_bytes: int = 0
    engine_written_bytes: int = 0
    process_written_bytes: int = 0
    read_bytes: int = 0
    hits: int = 0
    misses: int = 0
    disk_bytes: int = 0
    needed_copies: int = 0
    #: The latencies of each operation in nanoseconds.
    fetch: list[int] = field(default_factory=list)
    update: list[int] = field(default_factory=list)
    commit: list[int] = field(default_factory=list)

    @staticmethod
    def joined(parts: Sequence[TierLoadResult]) -> TierLoadResult:
        """All of ``parts``, one after another, as one."""
        whole = TierLoadResult()
        for part in parts:
            for name, more in vars(part).items():
                before = getattr(whole, name)
                setattr(whole, name, max(before, more) if name in _GREATEST else before + more)
        return whole

    @property
    def written_bytes(self) -> int:
        """As counted by the kernel, or by the engine if the kernel counted nothing (tmpfs is not on a disk)."""
        return self.process_written_bytes or self.engine_written_bytes

    @property
    def write_amplification(self) -> float | None:
        return self.written_bytes / self.changed_bytes if self.changed_bytes else None

    def rates(self) -> dict[str, float]:
        """Rates per second."""
        rated = ("steps", "fetched_bytes", "changed_bytes", "read_bytes", "written_bytes")
        return {f"{name}_per_s": getattr(self, name) / self.elapsed_s for name in rated}


class TierLoad:
    """Traffic on ``store``, whose records have ``keys`` and one schema. ``at_once``: fetches in flight."""

    def __init__(
        self,
        store: ParameterStore,
        keys: Sequence[str],
        model: StoreModel,
        *,
        at_once: int,
        commit_every: int,
    ) -> None:
        self._store, self._keys, self._model = store, keys, model
        self._commit_every = commit_every
        schema = store.info(keys[0]).schema
        self._record_bytes = schema.record_bytes
        self._weight_bytes = schema.layout(Group.WEIGHTS).nbytes
        # Leases hold at most half of the budget, so that the rest can turn over.
        records = max(store.config.host_budget // 2 // self._weight_bytes, 1)
        self._at_once = min(at_once, records)
        self._most_keys = records // self._at_once
        rng = np.random.default_rng(model.seed)
        self._gradient: NDArray[np.float32] = rng.standard_normal(schema.numel, np.float32)
        self._result = TierLoadResult()
        self._dirty: set[int] = set()
        self._version = max(model.versions)

    async def run(self, steps: Iterator[TrafficStep], seconds: float) -> TierLoadResult:
        """Run steps for ``seconds``. What is dirty before is committed first, and what they leave dirty at the end."""
        await self._commit()
        self._result = result = TierLoadResult()
        before, begun = self._counters(), time.perf_counter()
        while time.perf_counter() - begun < seconds or not result.commits:
            due = result.steps > 0 and result.steps % self._commit_every == 0
            await self._step(next(steps), due)
            result.steps += 1
        await self._commit()
        result.elapsed_s = time.perf_counter() - begun
        after = self._counters()
        for name, count in after.items():
            setattr(result, name, count - before[name])
        self._result = TierLoadResult()  # later work does not belong to this run
        return result

    def _counters(self) -> dict[str, int]:
        engine = self._store.core.engine.stats()
        by_group = self._store.core.cache.residency.stats().by_group
        own = [by_group[name] for name in ("weights", "moments")]
        return {
            "read_bytes": int(engine["read_bytes"]),
            "engine_written_bytes": int(engine["written_bytes"]),
            "process_written_bytes": process_bytes()[1],
            "hits": sum(group.hits for group in own),
            "misses": sum(group.misses for group in own),
        }

    async def _step(self, step: TrafficStep, commit_due: bool) -> None:
        turns = asyncio.Semaphore(self._at_once)
        parts = [
            keys[first : first + self._most_keys]
            for keys in step.fetches
            for first in range(0, len(keys), self._most_keys)
        ]
        # The commit goes first: its writes are queued before a fetch can delay them.
        await asyncio.gather(
            *([self._commit()] if commit_due else []), *(self._fetch(part, turns) for part in parts)
        )
        if step.stepped:
            self._update(step.stepped)

    async def _fetch(self, records: Sequence[int], turns: asyncio.Semaphore) -> None:
        async with turns:
            begun = time.perf_counter_ns()
            (await self._store.fetch_async([self._keys[record] for record in records])).release()
            self._result.fetch.append(time.perf_counter_ns() - begun)
        self._result.fetched_bytes += len(records) * self._weight_bytes

    def _update(self, records: Sequence[int]) -> None:
        begun = time.perf_counter_ns()
        self._store.update(dict.fromkeys((self._keys[record] for record in records), self._gradient), lr=1e-3)
        self._result.update.append(time.perf_counter_ns() - begun)
        self._version += 1
        self._model.update(records, self._version)
        self._dirty.update(records)
        self._result.changed_bytes += len(records) * self._record_bytes

    async def _commit(self) -> None:
        result, model = self._result, self._model
        result.needed_copies = max(result.needed_copies, model.copies())
        snapshot = None
        if model.retain and model.generation % _SNAPSHOT_EVERY == 0:
            snapshot = f"snapshot.{model.generation}"
        begun = time.perf_counter_ns()
        await self._store.commit_async(snapshot=snapshot)
        result.commit.append(time.perf_counter_ns() - begun)
        model.commit(snapshot)
        result.commits += 1
        result.dirty_bytes += len(self._dirty) * self._record_bytes
        self._dirty.clear()
        result.disk_bytes = max(result.disk_bytes, usage(self._store.directory)["disk_bytes"])
