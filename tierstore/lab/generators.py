"""Synthetic traces with seeds, and with exactly the distributions stated here.

Streams of keys (``Zipf``, ``Scan``, ``Tenants``) become traces as a ``KeyWorkload``; ``RoutingWorkload`` is a
router whose tokens choose experts, decoded or trained. Every workload has ``table()`` and ``chunks()``, the
records and the events, which ``write_trace`` of ``tierstore.lab.importing`` writes and ``in_memory`` holds.
The same seed gives the same events, whatever the size of the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierstore.config import check_least
from tierstore.errors import ConfigError
from tierstore.lab.importers.plain import stepped
from tierstore.lab.routing import Passes, Sections, expert_masks, expert_table, routing_events
from tierstore.trace.format import EventColumns, RecordTable, Trace, TraceHeader, TraceKind

_CHUNK_REQUESTS = 1 << 18
_CHUNK_CELLS = 1 << 23  # of the noise that top-k sampling draws at a time


class Workload(Protocol):
    """A trace that is made rather than recorded."""

    def table(self) -> RecordTable:
        """Its records."""

    def chunks(self) -> Iterator[EventColumns]:
        """Its events, the same at every call."""


class KeySource(Protocol):
    """An endless stream of keys from 0 to ``keys - 1``."""

    keys: int

    def stream(self, seed: np.random.SeedSequence) -> KeyStream:
        """The stream from its start."""


class KeyStream(Protocol):
    """A stream being drawn."""

    def draw(self, count: int) -> NDArray[np.int64]:
        """The next ``count`` keys."""


@dataclass(frozen=True, kw_only=True)
class Zipf:
    """Independent requests, rank r (from 1) with probability proportional to ``r ** -alpha``.

    Which key has which rank is a random permutation. It is drawn anew every ``phase_requests`` requests (0:
    never), and it moves on by one rank, cyclically, every ``1 / drift`` requests (0: never): request i of
    rank r is for ``permutation[(r - 1 + floor(i * drift)) mod keys]``.
    """

    keys: int
    alpha: float = 1.0
    drift: float = 0.0
    phase_requests: int = 0

    def __post_init__(self) -> None:
        check_least(self, 1, "keys")
        check_least(self, 0, "alpha", "drift", "phase_requests")

    def stream(self, seed: np.random.SeedSequence) -> KeyStream:
        return _ZipfStream(self, seed)


class _ZipfStream:
    def __init__(self, source: Zipf, seed: np.random.SeedSequence) -> None:
        self._source = source
        ranks, self._permutations = seed.spawn(2)
        self._rng = np.random.default_rng(ranks)
        weights = np.arange(1, source.keys + 1, dtype=np.float64) ** -source.alpha
        self._cumulative = np.cumsum(weights) / weights.sum()
        self._cumulative[-1] = 1.0
        self._drawn = 0
        self._phase = -1
        self._permutation = np.zeros(0, np.int64)

    def draw(self, count: int) -> NDArray[np.int64]:
        ranks = np.searchsorted(self._cumulative, self._rng.random(count), side="right")
        positions = np.arange(self._drawn, self._drawn + count)
        slots = (ranks + np.floor(positions * self._source.drift).astype(np.int64)) % self._source.keys
        length = self._source.phase_requests
        phases = positions // length if length else np.zeros(count, np.int64)
        keys = np.empty(count, np.int64)
        for phase in range(int(phases[0]), int(phases[-1]) + 1) if count else ():
            if (
                phase != self._phase
            ):  # phases come in order, so each permutation can be drawn when its phase begins
                self._phase = phase
                seed = self._permutations.spawn(1)[0]
                self._permutation = np.random.default_rng(seed).permutation(self._source.keys)
            here = phases == phase
            keys[here] = self._permutation[slots[here]]
        self._drawn += count
        return keys


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Cycles through the keys 0 to ``keys - 1``."""

    keys: int

    def __post_init__(self) -> None:
        check_least(self, 1, "keys")

    def stream(self, seed: np.random.SeedSequence) -> KeyStream:
        return _ScanStream(self.keys)


class _ScanStream:
    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._drawn = 0

    def draw(self, count: int) -> NDArray[np.int64]:
        self._drawn += count
        return np.arange(self._drawn - count, self._drawn) % self._keys


@dataclass(frozen=True, kw_only=True)
class Tenants:
    """Requests of several tenants. Each is, independently, tenant t's next with probability ``shares[t]``.

    Tenant t's keys follow those of the tenants before it; shares need not sum to 1.
    """

    tenants: tuple[KeySource, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tenants or len(self.tenants) != len(self.shares) or min(self.shares) <= 0:
            raise ConfigError(
                f"shares: expected one above 0 for each of {len(self.tenants)} tenants, got {self.shares}"
            )

    @property
    def keys(self) -> int:
        return sum(tenant.keys for tenant in self.tenants)

    def stream(self, seed: np.random.SeedSequence) -> KeyStream:
        return _TenantStream(self, seed)


class _TenantStream:
    def __init__(self, source: Tenants, seed: np.random.SeedSequence) -> None:
        choice, *seeds = seed.spawn(1 + len(source.tenants))
        self._rng = np.random.default_rng(choice)
        self._cumulative = np.cumsum(source.shares) / np.sum(source.shares)
        self._cumulative[-1] = 1.0
        self._streams = [tenant.stream(own) for tenant, own in zip(source.tenants, seeds, strict=True)]
        self._first_keys = np.concatenate(([0], np.cumsum([tenant.keys for tenant in source.tenants])))

    def draw(self, count: int) -> NDArray[np.int64]:
        tenant = np.searchsorted(self._cumulative, self._rng.random(count), side="right")
        keys = np.empty(count, np.int64)
        for number, stream in enumerate(self._streams):
            here = tenant == number
            keys[here] = stream.draw(int(here.sum())) + self._first_keys[number]
        return keys


@dataclass(frozen=True, kw_only=True)
class KeyWorkload:
    """``requests`` of a stream, one key each. All keys have one frame and ``key_bytes``."""

    source: KeySource
    requests: int
    requests_per_step: int = 1000
    key_bytes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 1, "requests", "requests_per_step", "key_bytes")

    def table(self) -> RecordTable:
        return RecordTable.of_columns(0, (1, 0, 0), (self.key_bytes, 0, 0), 1, count=self.source.keys)

    def chunks(self) -> Iterator[EventColumns]:
        stream = self.source.stream(np.random.SeedSequence(self.seed))
        for first in range(0, self.requests, _CHUNK_REQUESTS):
            keys = stream.draw(min(_CHUNK_REQUESTS, self.requests - first))
            yield stepped(keys.astype(np.uint32), first, self.requests_per_step)
        if self.requests % self.requests_per_step:
            last = self.requests // self.requests_per_step
            yield EventColumns.build([0], [], kinds=TraceKind.END_STEP, steps=last)


@dataclass(frozen=True, kw_only=True)
class RoutingWorkload:
    """Tokens through ``layers`` routers; each token chooses ``k`` of ``experts`` in each.

    In each layer experts have weights proportional to ``rank ** -skew``; each layer has its own random permutation of
    ranks. A token draws k experts one after another by weight, without replacement (by the k
    largest of ``log(weight) + Gumbel noise``, which is the same). With probability ``persistence``,
    independently in each layer, it takes the previous token's choice instead. So all tokens' choices have the same
    distribution, and choices n tokens apart are equal with probability ``persistence ** n`` beyond chance.
    ``passes``: decoding (forward), or training (forward, then backward: a palindrome of layers).
    """

    layers: int
    experts: int
    k: int
    tokens_per_step: int
    steps: int
    skew: float = 0.0
    persistence: float = 0.0
    passes: Passes = Passes.FORWARD_BACKWARD
    sections: Sections = Sections.WHOLE
    weight_bytes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 1, "layers", "experts", "k", "steps", "tokens_per_step", "weight_bytes")
        check_least(self, 0, "skew", "persistence")
        if self.k > self.experts:
            raise ConfigError(f"k: expected at most {self.experts} experts, got {self.k}")
        if self.persistence > 1:
            raise ConfigError(f"persistence: expected at most 1, got {self.persistence:g}")

    def table(self) -> RecordTable:
        layers = np.repeat(np.arange(self.layers), self.experts)
        return expert_table(layers, sections=self.sections, weight_bytes=self.weight_bytes)

    def topk(self) -> Iterator[NDArray[np.int64]]:
        """The tokens' choices, in blocks of steps: [tokens, layers, k], the experts of a token in any order."""
        ranks, noise, keeps = (np.random.default_rng(s) for s in np.random.SeedSequence(self.seed).spawn(3))
        rank = np.stack([ranks.permutation(self.experts) for _ in range(self.layers)])
        log_weight = -self.skew * np.log1p(rank)
        before: NDArray[np.int64] | None = None
        at_once = max(1, _CHUNK_CELLS // (self.tokens_per_step * self.layers * self.experts))
        for first in range(0, self.steps, at_once):
            tokens = min(at_once, self.steps - first) * self.tokens_per_step
            # -log of an exponential variable is a Gumbel variable; only the order of the sums matters.
            scores = log_weight - np.log(noise.standard_exponential((tokens, self.layers, self.experts)))
            drawn = np.argpartition(scores, -self.k, axis=2)[:, :, -self.k :].astype(np.int64)
            fresh = keeps.random((tokens, self.layers)) >= self.persistence
            if before is None:
                fresh[0] = True
                before = drawn[0]
            source = np.where(fresh, np.arange(tokens)[:, None], -1)
            source = np.maximum.accumulate(source, axis=0)
            chosen = np.take_along_axis(drawn, np.maximum(source, 0)[:, :, None], axis=0)
            chosen = np.where(source[:, :, None] < 0, before, chosen)
            before = chosen[-1]
            yield chosen

    def chunks(self) -> Iterator[EventColumns]:
        first = 0
        for topk in self.topk():
            tokens = np.arange(len(topk)).reshape(-1, self.tokens_per_step)
            masks = expert_masks(topk, tokens, self.experts)
            yield routing_events(masks, first_step=first, passes=self.passes, sections=self.sections)
            first += len(tokens)


def in_memory(workload: Workload, *, origin: str = "generated") -> Trace:
    """The whole trace, with a header in which everything fits."""
    table = workload.table()
    header = TraceHeader(table.total_frames, policy="lru", records=table, origin=origin)
    return Trace(header=header, **vars(EventColumns.joined(list(workload.chunks()))))
