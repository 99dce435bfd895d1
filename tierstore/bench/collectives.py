"""Fewer, larger messages: what fusion buffers and gradient buckets save, over real ranks on Gloo.

Two modes take turns, round by round, over the same model: ``fused`` (one gather for the slices of a unit, gradients in
buckets) and ``apart`` (every parameter gathered and reduced alone). Both compute the same bits. A round is timed
between barriers, so it is over when the slower rank is; figures are medians over rounds, ``saved_s`` the median
of the rounds' differences.

The model has dense layers only: experts would travel in both modes alike.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tierstore.bench.checks import at_least
from tierstore.bench.processes.namespaces import namespaces_limited_to
from tierstore.bench.processes.ranks import run_ranks
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, named, prefixed, ratios
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.parallel import RankGroup

_TIMEOUT_S = 600.0
#: The two modes, by the value of ``dense.fusion``.
_MODES = {"fused": "unit", "apart": "parameter"}


@dataclass(frozen=True, kw_only=True)
class CollectivesBench(Figures):
    """What to measure: ``layers`` blocks of width ``d_model``, ``tokens`` a step on each rank (one sequence).
    ``namespace_bandwidth``: bytes a second that the kernel lets each rank send (0: no limit).
    """

    ranks: int = 2
    layers: int = field(default=8, metadata=named("layers_count"))
    d_model: int = field(default=128, metadata=named("d_model_count"))
    tokens: int = field(default=64, metadata=named("tokens_count"))
    rounds: int = field(default=7, metadata=named("rounds_count"))
    steps: int = field(default=3, metadata=INTERNAL)
    bucket_bytes: int = 32 << 20
    namespace_bandwidth: int = field(default=0, metadata=INTERNAL)

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"ranks: expected at least 2, got {self.ranks}: one sends no messages")
        at_least(1, layers=self.layers, d_model=self.d_model, tokens=self.tokens)
        at_least(1, rounds=self.rounds, steps=self.steps)
        if self.d_model % 8:
            raise ConfigError(f"d_model: expected a multiple of 8, got {self.d_model}")


@dataclass(frozen=True, kw_only=True)
class ModeTimes(Figures):
    """Steps of one mode, by the round; messages and bytes of one step, of one rank."""

    step_samples_s: Sequence[float]
    step_s: float
    step_min_s: float
    step_max_s: float
    collectives_count: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class CollectivesResult(Figures):
    """What ``run`` found. ``saved_s``: the median of the rounds' differences."""

    bench: str = "collectives"
    backend: str = "gloo"
    asked: CollectivesBench = field(metadata=prefixed(""))
    namespace_bytes_per_s: int | None
    parameters: int
    same_bits: bool
    fused: ModeTimes
    apart: ModeTimes
    saved_s: float
    messages_ratio: float


def run(bench: CollectivesBench) -> CollectivesResult:
    """Measures. Raises CapabilityError (no namespaces), WorkerError."""
    with namespaces_limited_to(bench.namespace_bandwidth, bench.ranks) as namespaces:
        answers = run_ranks(
            "tierstore.bench.collectives",
            [json.dumps(asdict(bench))],
            ranks=bench.ranks,
            timeout_s=_TIMEOUT_S,
            namespaces=namespaces,
        )
    found = _Found(**answers[0])  # between barriers all ranks see the same seconds
    fused, apart = (ModeTimes(**found.modes[name]) for name in _MODES)
    saved = [a - f for a, f in zip(apart.step_samples_s, fused.step_samples_s, strict=True)]
    return CollectivesResult(
        asked=bench,
        namespace_bytes_per_s=bench.namespace_bandwidth or None,
        parameters=found.parameters,
        same_bits=found.same_bits,
        fused=fused,
        apart=apart,
        saved_s=statistics.median(saved),
        messages_ratio=apart.collectives_count / fused.collectives_count,
    )


def measurements(result: CollectivesResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for mode, of in (("fused", result.fused), ("apart", result.apart)):
        how = {"messages": mode}
        yield measured("step", of.step_samples_s, "s", Better.LOWER, parameters=how)
        yield counted("messages a step", of.collectives_count, "messages", Better.LOWER, parameters=how)
        yield counted("sent a step", of.sent_bytes, "bytes", Better.LOWER, parameters=how)
    fused_to_apart = ratios(result.fused.step_samples_s, result.apart.step_samples_s)
    yield derived("step fused to apart", fused_to_apart, "ratio", Better.LOWER)


# One rank ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """One rank's answer; ``modes`` are the fields of ``ModeTimes``."""

    parameters: int
    same_bits: bool
    modes: Mapping[str, Mapping[str, Any]]


def _rank(bench: CollectivesBench) -> _Found:
    import torch

    from tierstore.parallel import ParallelConfig, launch

    torch.set_num_threads(1)
    with launch(ParallelConfig(timeout_s=_TIMEOUT_S), device="cpu") as mesh:
        return _take_turns(bench, mesh.world)


def _take_turns(bench: CollectivesBench, world: RankGroup) -> _Found:
    import torch

    runs = {name: _Run(bench, world, fusion) for name, fusion in _MODES.items()}
    for each in runs.values():
        each.step()  # first touch, and connections
    for _ in range(bench.rounds):
        for each in runs.values():
            world.barrier()
            each.round()
    fused, apart = runs.values()
    same = all(
        torch.equal(one, other)
        for unit in range(len(fused.dense.layouts))
        for one, other in zip(fused.dense.whole(unit), apart.dense.whole(unit), strict=True)
    )
    modes = {name: asdict(each.found()) for name, each in runs.items()}
    return _Found(fused.parameters, same, modes)


class _Run:
    """One mode: a model with its slices, and the times of its rounds."""

    def __init__(self, bench: CollectivesBench, world: RankGroup, fusion: str) -> None:
        import torch

        from tierstore.dense import DenseConfig, DenseSlices, Fusion, GatherOnDemand, unit_layouts
        from tierstore.model import ModelConfig, Transformer
        from tierstore.store.adamw import AdamWConfig

        self._bench, self._world = bench, world
        self._model = Transformer(
            ModelConfig(
                d_model=bench.d_model,
                n_layers=bench.layers + 1,
                n_heads=4,
                seq_len=bench.tokens,
                moe_every=bench.layers + 1,
            ),
            None,
            mixture=lambda layer: torch.nn.Identity(),
        )
        # A model has at least one layer of experts. It is the last one, and is left out.
        self._model.blocks = self._model.blocks[:-1]
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        assert self._model.head is not None
        units = [
            ("embedding", [self._model.embedding]),
            *(
                (f"block.{number}", list(block.parameters()))
                for number, block in enumerate(self._model.blocks)
            ),
            ("head", [*self._model.norm.parameters(), self._model.head]),
        ]
        config = DenseConfig(fusion=Fusion(fusion), bucket_bytes=bench.bucket_bytes)
        self.dense = DenseSlices(
            units,
            unit_layouts(units, ranks=world.size, fusion=config.fusion),
            group=world,
            device=torch.device("cpu"),
            adamw=AdamWConfig(),
            config=config,
        )
        self.dense.attach(self._model, GatherOnDemand(self.dense, config.reshard))
        generator = torch.Generator().manual_seed(world.rank)
        self._tokens = torch.randint(256, (1, bench.tokens + 1), generator=generator)
        self._rounds_s: list[float] = []
        self._steps = 0

    def step(self) -> None:
        import torch

        self.dense.zero_grad()
        self.dense.begin_micro()
        output = self._model(self._tokens[:, :-1], self._tokens[:, 1:])
        assert output.objective is not None
        torch.autograd.backward(output.objective / self._world.size)
        self.dense.end_micro()
        self.dense.finish()
        self.dense.step(1e-3)
        self._steps += 1

    def round(self) -> None:
        started = time.perf_counter()
        for _ in range(self._bench.steps):
            self.step()
        self._world.barrier()
        self._rounds_s.append((time.perf_counter() - started) / self._bench.steps)

    def found(self) -> ModeTimes:
        traffic = self.dense.traffic
        return ModeTimes(
            step_samples_s=self._rounds_s,
            step_s=statistics.median(self._rounds_s),
            step_min_s=min(self._rounds_s),
            step_max_s=max(self._rounds_s),
            collectives_count=(traffic.gathers + traffic.reductions) // self._steps,
            sent_bytes=(traffic.gather_bytes + traffic.reduction_bytes) // self._steps,
        )


if __name__ == "__main__":
    print(json.dumps(asdict(_rank(CollectivesBench(**json.loads(sys.argv[1]))))), flush=True)
    # Gloo's threads have aborted processes whose interpreter was being taken apart; the answer is out.
    os._exit(0)
