"""Measures the costs of this machine that ``tierstore plan`` predicts with, as alpha-beta lines.

Disk: streams of transfers through the engine, past the page cache, of several sizes. Copies and AdamW: the engine's own
kernels. Computation: a block of the model under autograd, and one expert's formulas, forward and backward, over several
numbers of tokens. Collectives: the group's own, between local ranks on Gloo; all-to-alls also of fewer ranks. Each point is
measured several times, in turns; lines go through the medians (``machine_profile.fit_cost``).

It is a benchmark and not part of ``plan``, which measures nothing and answers at once.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from tierstore import _native, machine
from tierstore.bench.checks import at_least
from tierstore.bench.probes.disk import Bytes, DiskProbe
from tierstore.bench.processes.ranks import run_ranks
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import IF_ANY, Figures
from tierstore.capabilities import chosen_instruction_set
from tierstore.config import as_dict
from tierstore.errors import ConfigError
from tierstore.links import LinksConfig
from tierstore.machine_profile import ASSUMED, Cost, Evidence, Profile, fit_cost, fit_errors
from tierstore.store.config import IoConfig
from tierstore.train.footprint import resident_bytes

_Points = list[tuple[float, float]]
#: How the all-to-alls of a number of ranks are called.
_EXCHANGE = "all_to_all of "
#: Floating point operations are the amounts of these costs, bytes those of the others.
_COMPUTING = ("dense_flops", "expert_flops", "expert_forward", "expert_backward")


@dataclass(frozen=True, kw_only=True)
class MachineBench:
    """What to measure. ``directory``: on the disk in question. ``ranks``: local ranks for the collectives. ``links``: limits
    of theirs.
    """

    directory: Path = Path()
    ranks: int = 2
    repeats: int = 5
    disk_bytes: int = 64 << 20
    threads: int = 0
    links: LinksConfig = field(default_factory=LinksConfig)

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

    def error_ratios(self, name: str) -> list[float]:
        """By how much of itself each point of the cost ``name`` is off its line."""
        points, cost = self.points[name], cost_of(self.profile, name)
        return fit_errors(cost, [amount for amount, _ in points], [spent for _, spent in points])


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
        exchanges={count: _fit(points[f"{_EXCHANGE}{count}"]) for count in _counts(bench.ranks)},
        **{name: _fit(pairs) for name, pairs in points.items() if not name.startswith(_EXCHANGE)},
    )
    return Measured(profile, points)


def cost_of(profile: Profile, name: str) -> Cost:
    """The cost that ``points`` and ``rows`` call ``name``."""
    if name.startswith(_EXCHANGE):
        return profile.exchanges[int(name.removeprefix(_EXCHANGE))]
    cost: Cost = getattr(profile, name)
    return cost


def _counts(ranks: int) -> list[int]:
    """Numbers of ranks whose all-to-alls are measured: 2, 4, 8, .. and ``ranks``."""
    return sorted({*(1 << power for power in range(1, ranks.bit_length())), ranks})


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
            **_expert_points(bench.repeats),
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


def _expert_points(repeats: int) -> dict[str, _Points]:
    """One expert by its rows: forward, backward, and a pass of either in the mean."""
    import torch

    from tierstore.moe.config import ExpertShape
    from tierstore.moe.experts import Workspace, backward_weighted_expert, forward_expert

    shape = ExpertShape(256, 512)
    points: dict[str, _Points] = {"expert_flops": [], "expert_forward": [], "expert_backward": []}
    for rows in (16, 64, 256, 1024):
        x = torch.randn(rows, shape.d_model)
        flat, gradients = torch.randn(shape.numel), torch.empty(shape.numel)
        inner, out = torch.empty(rows, shape.inner_rows), torch.empty(rows, shape.d_model)
        weight, grad_out = torch.ones(rows), torch.randn(rows, shape.d_model)
        work = Workspace(shape, rows, x, inner=2, hidden=2)
        forward = _timed(partial(forward_expert, shape, flat, x, inner, out, work), repeats)
        backward = _timed(
            partial(backward_weighted_expert, shape, flat, gradients, x, inner, weight, grad_out, out, work),
            repeats,
        )
        flops = 2 * rows * shape.numel
        points["expert_forward"] += [(flops, spent) for spent in forward]
        points["expert_backward"] += [(2 * flops, spent) for spent in backward]
        both = zip(forward, backward, strict=True)
        points["expert_flops"] += [(1.5 * flops, (there + back) / 2) for there, back in both]
    return points


# Collectives ------------------------------------------------------------------------------------------------


def _collectives(bench: MachineBench) -> dict[str, _Points]:
    sizes = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
    arguments = [json.dumps(as_dict(bench.links)), str(bench.repeats), *map(str, sizes)]
    points: dict[str, _Points] = {}
    for count in _counts(bench.ranks):
        answers = run_ranks("tierstore.bench.machine.rank", arguments, ranks=count, timeout_s=300.0)
        found: dict[str, _Points] = {
            name: [(amount, spent) for amount, spent in pairs] for name, pairs in answers[0].items()
        }
        points[f"{_EXCHANGE}{count}"] = found["all_to_all"]
    return found | points


@dataclass(frozen=True, kw_only=True)
class CostLine(Figures):
    """One cost of the profile: operations a second of computation, bytes a second of the others. ``error_ratio``: how far
    its points are from its line, in the median and at most.
    """

    cost: str
    latency_s: float
    flops_per_s: float | None = field(default=None, metadata=IF_ANY)
    bytes_per_s: float | None = field(default=None, metadata=IF_ANY)
    median_error_ratio: float | None = field(default=None, metadata=IF_ANY)
    largest_error_ratio: float | None = field(default=None, metadata=IF_ANY)


@dataclass(frozen=True, kw_only=True)
class MachineResult(Figures):
    """The lines of the profile that was written to ``profile``."""

    profile: str
    costs: Sequence[CostLine]


def result_of(found: Measured, path: Path) -> MachineResult:
    """``found``, whose profile lies at ``path``, for programs."""
    lines = []
    for name, cost, _ in rows(found):
        errors, computing = found.error_ratios(name), name in _COMPUTING
        lines.append(
            CostLine(
                cost=name,
                latency_s=cost.latency_s,
                median_error_ratio=statistics.median(errors),
                largest_error_ratio=max(errors),
                flops_per_s=cost.per_s if computing else None,
                bytes_per_s=None if computing else cost.per_s,
            )
        )
    return MachineResult(profile=str(path), costs=lines)


def rows(found: Measured) -> list[tuple[str, Cost, Cost]]:
    """The costs of ``found`` for people, each beside what a plan assumes without it."""
    return [(name, cost_of(found.profile, name), _assumed(name)) for name in found.points]


def _assumed(name: str) -> Cost:
    if name.startswith(_EXCHANGE):
        return ASSUMED.all_to_all
    cost: Cost | None = getattr(ASSUMED, name)
    return cost or ASSUMED.expert_flops


def measurements(found: Measured) -> Iterator[Measurement]:
    """What ``run`` found, for a document: each point with its samples, and the lines through them."""
    for name, points in found.points.items():
        kind = "operations" if name in _COMPUTING else "bytes"
        samples: dict[float, list[float]] = {}
        for amount, spent in points:
            samples.setdefault(amount, []).append(spent)
        for amount, times in samples.items():
            yield measured(name, times, "s", Better.LOWER, parameters={kind: amount})
        cost = cost_of(found.profile, name)
        yield derived("latency", cost.latency_s, "s", Better.LOWER, parameters={"cost": name})
        if math.isfinite(cost.per_s):
            yield derived("rate", cost.per_s, f"{kind}/s", Better.HIGHER, parameters={"cost": name})
