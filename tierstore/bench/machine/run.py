"""Measures the costs of this machine that ``tierstore plan`` predicts with, as alpha-beta lines.

Disk: streams of transfers through the engine, past the page cache, of several sizes. Copies and AdamW: the engine's own
kernels. Computation: a block of the model under autograd, and one expert's formulas, over several numbers of tokens.
Collectives: the group's own, between local ranks on Gloo. Each point is measured several times, in turns; lines go through
the medians (``plan.costs.fit_cost``).

It is a benchmark and not part of ``plan``, which measures nothing and answers at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tierstore import _native, machine
from tierstore.bench.checks import at_least
from tierstore.bench.probes.disk import Bytes, DiskProbe
from tierstore.bench.processes.ranks import run_ranks
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import IF_ANY, Figures
from tierstore.capabilities import chosen_instruction_set
from tierstore.errors import ConfigError
from tierstore.plan.costs import ASSUMED, Cost, Profile, fit_cost
from tierstore.plan.evidence import Evidence
from tierstore.store.config import IoConfig
from tierstore.train.footprint import resident_bytes

_Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class MachineBench:
    """What to measure. ``directory``: on the disk in question. ``ranks``: local ranks for the collectives."""

    directory: Path = Path()
    ranks: int = 2
    repeats: int = 5
    disk_bytes: int = 64 << 20
    threads: int = 0

    def __post_init__(self) -> None:
        at_least(2, **{"--ranks": self.ranks})
        at_least(1, **{"--repeats": self.repeats})
        if self.disk_bytes < 8 << 20:
            raise ConfigError(f"--disk-bytes: expected at least 8 MiB, got {self.disk_bytes}")


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile, and by the names of its costs the points that its lines go through: amounts, and seconds for each."""

    profile: Profile
    points: Mapping[str, _Points]


def run(bench: MachineBench, say: Callable[[str], None] = lambda _: None) -> Measured:
    """The profile of this machine. Raises OSError, WorkerError."""
    say("computation")
    points = _computation(bench)
    process = resident_bytes()  # torch and its libraries are imported by now
    say("copies and AdamW")
    points |= _kernels(bench.repeats)
    say("disk")
    points |= _disk(bench)
    say(f"collectives of {bench.ranks} ranks")
    points |= _collectives(bench)
    profile = Profile(
        evidence=Evidence.MEASURED,
        machine=f"{machine.cores()} cores, {chosen_instruction_set()}, kernel {machine.kernel()}",
        ranks=bench.ranks,
        process_bytes=process,
        **{name: _fit(pairs) for name, pairs in points.items()},
    )
    return Measured(profile, points)


def _fit(points: _Points) -> Cost:
    return fit_cost([amount for amount, _ in points], [spent for _, spent in points])


def _timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of ``work``, once it has run unmeasured."""
    work()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return found


# Disk -------------------------------------------------------------------------------------------------------


def _disk(bench: MachineBench) -> dict[str, _Points]:
    half = bench.disk_bytes // 2
    mixes = [Bytes(bench.disk_bytes, 0), Bytes(0, bench.disk_bytes), Bytes(half, half)]
    points: dict[str, _Points] = {"disk_read": [], "disk_write": [], "disk_mixed": []}
    for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20):
        with closing(DiskProbe(bench.directory, bench.disk_bytes, (size,), IoConfig())) as probe:
            for _ in range(bench.repeats):
                for found, mix in zip(points.values(), mixes, strict=True):
                    found.append((size, size / probe.disk_bytes_per_s(mix)))
    return points


# Copies and AdamW -------------------------------------------------------------------------------------------


def _kernels(repeats: int) -> dict[str, _Points]:
    copies: _Points = []
    steps: _Points = []
    row = np.array([[1e-3, 0.9, 0.95, 1e-8, 0.01, 0.1, 0.2]], np.float32)
    engine = _native.Engine(backend=_native.IoBackend.THREADS)
    try:
        for size in (256 << 10, 1 << 20, 4 << 20, 16 << 20):
            arena = _native.Arena(2 * size, _native.HugePages.AUTO)
            source, target = (_native.Buffer(arena, [(i * size, size)], size) for i in range(2))

            def copy(source: _native.Buffer = source, target: _native.Buffer = target) -> None:
                engine.wait_all([engine.copy(target, source)])

            copies += [(size, spent) for spent in _timed(copy, repeats)]
            arrays = [np.full(size // 4, 1e-3, np.float32) for _ in range(4)]

            def step(arrays: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = arrays) -> None:
                _native.adamw(arrays[0], arrays[1], arrays[2], arrays[3], row)

            steps += [(size // 4 * 28, spent) for spent in _timed(step, repeats)]
    finally:
        engine.close()
    return {"copy": copies, "adamw": steps}


# Computation ------------------------------------------------------------------------------------------------


def _computation(bench: MachineBench) -> dict[str, _Points]:
    import torch

    before = torch.get_num_threads()
    if bench.threads:
        torch.set_num_threads(bench.threads)
    try:
        return {
            "dense_flops": _dense_points(bench.repeats),
            "expert_flops": _expert_points(bench.repeats),
        }
    finally:
        torch.set_num_threads(before)


def _dense_points(repeats: int) -> _Points:
    """One dense block, forward and backward: 6 operations a parameter and token, and attention's. Two passes."""
    import torch

    from tierstore.model.attention import rotary_tables
    from tierstore.model.config import ModelConfig
    from tierstore.model.transformer import Block
    from tierstore.moe.router import NoiseKey

    positions, d = 128, 256
    config = ModelConfig(d_model=d, n_heads=4, seq_len=positions, d_ff_dense=512)
    block = Block(config, 0, None)
    cos, sin = rotary_tables(positions, config.head_dim, config.rope_theta)
    numel = sum(parameter.numel() for parameter in block.parameters())
    points: _Points = []
    for batch in (1, 2, 4, 8):
        x = torch.randn(batch, positions, d, requires_grad=True)

        def work(x: torch.Tensor = x) -> None:
            y, _ = block(x, cos, sin, NoiseKey())
            torch.autograd.backward(y.sum())

        # A pass is a third of this on average: forward 2, backward 4 of the 6 operations.
        flops = 6 * batch * positions * (numel + positions * d)
        points += [(flops / 2, spent / 2) for spent in _timed(work, repeats)]
    return points


def _expert_points(repeats: int) -> _Points:
    import torch

    from tierstore.moe.config import ExpertShape
    from tierstore.moe.experts import Workspace, backward_weighted_expert, forward_expert

    shape = ExpertShape(256, 512)
    points: _Points = []
    for rows in (16, 64, 256, 1024):
        x = torch.randn(rows, shape.d_model)
        flat, gradients = torch.randn(shape.numel), torch.empty(shape.numel)
        inner, out = torch.empty(rows, shape.inner_rows), torch.empty(rows, shape.d_model)
        weight, grad_out = torch.ones(rows), torch.randn(rows, shape.d_model)
        work = Workspace(shape, rows, x, inner=2, hidden=2)

        def both(
            x: torch.Tensor = x,
            flat: torch.Tensor = flat,
            gradients: torch.Tensor = gradients,
            inner: torch.Tensor = inner,
            out: torch.Tensor = out,
            weight: torch.Tensor = weight,
            grad_out: torch.Tensor = grad_out,
            work: Workspace = work,
        ) -> None:
            forward_expert(shape, flat, x, inner, out, work)
            backward_weighted_expert(shape, flat, gradients, x, inner, weight, grad_out.clone(), out, work)

        flops = 6 * rows * shape.numel
        points += [(flops / 2, spent / 2) for spent in _timed(both, repeats)]
    return points


# Collectives ------------------------------------------------------------------------------------------------


def _collectives(bench: MachineBench) -> dict[str, _Points]:
    sizes = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
    arguments = [str(bench.repeats), *map(str, sizes)]
    answers = run_ranks("tierstore.bench.machine.rank", arguments, ranks=bench.ranks, timeout_s=300.0)
    found: dict[str, Sequence[tuple[float, float]]] = answers[0]
    return {name: [(amount, spent) for amount, spent in pairs] for name, pairs in found.items()}


@dataclass(frozen=True, kw_only=True)
class CostLine(Figures):
    """One cost of the profile: operations a second of computation, bytes a second of the others."""

    cost: str
    latency_s: float
    flops_per_s: float | None = field(default=None, metadata=IF_ANY)
    bytes_per_s: float | None = field(default=None, metadata=IF_ANY)


@dataclass(frozen=True, kw_only=True)
class MachineResult(Figures):
    """The lines of the profile that was written to ``profile``."""

    profile: str
    costs: Sequence[CostLine]


def result_of(profile: Profile, path: Path) -> MachineResult:
    """``profile``, which lies at ``path``, for programs."""
    lines = [
        CostLine(
            cost=name,
            latency_s=cost.latency_s,
            flops_per_s=cost.per_s if name.endswith("flops") else None,
            bytes_per_s=None if name.endswith("flops") else cost.per_s,
        )
        for name, cost, _ in rows(profile)
    ]
    return MachineResult(profile=str(path), costs=lines)


def rows(profile: Profile) -> list[tuple[str, Cost, Cost]]:
    """The lines of ``profile`` for people, each beside what a plan assumes without it."""
    names = [name for name in vars(ASSUMED) if isinstance(getattr(ASSUMED, name), Cost)]
    return [(name, getattr(profile, name), getattr(ASSUMED, name)) for name in names]


def measurements(found: Measured) -> Iterator[Measurement]:
    """What ``run`` found, for a document: each point with its samples, and the lines through them."""
    for name, points in found.points.items():
        kind = "operations" if name.endswith("flops") else "bytes"
        samples: dict[float, list[float]] = {}
        for amount, spent in points:
            samples.setdefault(amount, []).append(spent)
        for amount, times in samples.items():
            yield measured(name, times, "s", Better.LOWER, parameters={kind: amount})
        cost: Cost = getattr(found.profile, name)
        yield derived("latency", cost.latency_s, "s", Better.LOWER, parameters={"cost": name})
        if math.isfinite(cost.per_s):
            yield derived("rate", cost.per_s, f"{kind}/s", Better.HIGHER, parameters={"cost": name})
