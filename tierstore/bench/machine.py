"""The costs of this machine, as alpha-beta lines, with which ``tierstore plan`` predicts.

Disk: streams of transfers through the engine, bypassing the page cache, in several sizes. Copies and AdamW: the engine's own
kernels. Computation: a block of the model under autograd, and one expert's formulas, forward and backward, for several
numbers of tokens, in the model's shapes and compute type. AdamW's state and experts come from memory, not from a processor's
caches. Collectives: the group's own, between local ranks on Gloo; all-to-alls also of fewer ranks. Each point is measured
several times, in turns; lines are fitted to the medians (``machine_profile.fit_cost``).

This is a benchmark and not part of ``plan``, which measures nothing and answers at once. Run as a module, it is one rank
that measures collectives.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from tierstore import _native, machine
from tierstore.bench.documents import Measurement, derived, measured
from tierstore.bench.harness import Benchmark, FigureTable, Found, Progress, size_option
from tierstore.bench.probes import Bytes, DiskProbe
from tierstore.bench.processes import AskedRanks, serve
from tierstore.capabilities import chosen_instruction_set
from tierstore.config import PathKind, as_dict, check_least, from_dict, option
from tierstore.errors import ConfigError
from tierstore.links import LinksConfig
from tierstore.machine import resident_bytes
from tierstore.machine_profile import ASSUMED, Cost, Evidence, Profile, fit_cost, fit_errors, save_profile
from tierstore.model.config import ModelConfig
from tierstore.outputs import OutputKind
from tierstore.parallel.collectives import RankGroup, Work
from tierstore.store.config import IoConfig
from tierstore.train.config import TrainConfig

_Points = list[tuple[float, float]]
#: Name prefix of the all-to-alls of a number of ranks.
_EXCHANGE = "all_to_all of "
#: More bytes than a processor's caches hold.
_CACHES = 128 << 20
#: Costs whose amounts are floating point operations; those of the others are bytes.
_COMPUTING = ("dense_flops", "expert_flops", "expert_forward", "expert_backward")


@dataclass(frozen=True, kw_only=True)
class MachineBench(Benchmark):
    """Measure disk, copies, AdamW, computation and collectives into PROFILE, a JSON file for `plan --profile`.

    --set model... measures the products of another model's shapes; --set links.gather... and links.exchange... limit the
    collectives.
    """

    profile: Path = option(argument=True, path=OutputKind.PROFILE)
    ranks: int = option(2, "Local ranks for the collectives.")
    repeats: int = option(5, "Measurements of each point.")
    threads: int = option(0, "Threads of torch (0: unchanged).")
    disk_bytes: int = size_option("64MiB", "Bytes of one transfer stream.")
    directory: Path = option(Path(), "Directory of the disk.", "--dir", path=PathKind.EXISTING_DIRECTORY)
    train: TrainConfig = field(
        default_factory=TrainConfig,
        metadata={"configuration": ("model.", "links.gather.", "links.exchange.")},
    )

    def __post_init__(self) -> None:
        check_least(self, 2, "ranks", table="--")
        check_least(self, 1, "repeats", table="--")
        if self.disk_bytes < 8 << 20:
            raise ConfigError(f"--disk-bytes: expected at least 8 MiB, got {self.disk_bytes}")

    @property
    def measured_in(self) -> Path:
        return self.directory

    def run(self, progress: Progress) -> Found:
        """Measure, and write the profile. Raises OSError, WorkerError."""
        model = self.train.model
        assert isinstance(model, ModelConfig)
        progress.say("computation")
        process, points = _computation(self, model)
        progress.say("copies and AdamW")
        points |= _kernels(self.repeats)
        progress.say("disk")
        points |= _disk(self)
        progress.say(f"collectives of {self.ranks} ranks")
        points |= _collectives(self)
        lines = {name: fit_cost(*zip(*pairs, strict=True)) for name, pairs in points.items()}
        profile = Profile(
            evidence=Evidence.MEASURED,
            machine=f"{machine.cores()} cores, {chosen_instruction_set()}, kernel {machine.kernel()}, "
            f"{model.compute_dtype.value} products of {model.d_model} x {model.d_ff}",
            ranks=self.ranks,
            process_bytes=process,
            exchanges={count: lines[f"{_EXCHANGE}{count}"] for count in _counts(self.ranks)},
            **{name: cost for name, cost in lines.items() if not name.startswith(_EXCHANGE)},
        )
        save_profile(profile, self.profile)
        costs, rows = [], []
        measurements: list[Measurement] = []
        for name, cost in lines.items():
            errors = fit_errors(cost, *zip(*points[name], strict=True))
            costs.append(
                {
                    "cost": name,
                    "latency_s": cost.latency_s,
                    "flops_per_s" if name in _COMPUTING else "bytes_per_s": cost.per_s,
                    "median_error_ratio": statistics.median(errors),
                    "largest_error_ratio": max(errors),
                }
            )
            rates = {"rate": cost, "assumed": _assumed(name)}
            rows.append(costs[-1] | {column: _rate(name, one.per_s) for column, one in rates.items()})
            measurements += _measurements(name, points[name], cost)
        columns = {
            "": "cost",
            "latency": "latency_s",
            "rate": "rate",
            "off the line: median": "median_error_ratio",
            "at most": "largest_error_ratio",
            "assumed without a profile": "assumed",
        }
        return Found(
            figures={"profile": self.profile, "costs": costs},
            measurements=measurements,
            shown=[FigureTable(f"{profile.machine}; written to {self.profile}", columns, rows)],
        )


def _counts(ranks: int) -> list[int]:
    """Numbers of ranks whose all-to-alls are measured: 2, 4, 8, .. and ``ranks``."""
    return sorted({*(1 << power for power in range(1, ranks.bit_length())), ranks})


def _uncached(nbytes: int) -> int:
    """How many blocks of ``nbytes`` take turns so that each comes from memory, as a run's experts do."""
    return 1 + _CACHES // nbytes


def _in_turns(calls: Iterable[Callable[[], object]]) -> Callable[[], object]:
    """A call of the next of ``calls``, over and over."""
    turns = cycle(calls)
    return lambda: next(turns)()


def _timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of ``work`` in each repeat, after one unmeasured run."""
    work()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return found


def _rate(name: str, per_s: float) -> str:
    if math.isinf(per_s):
        return "any"
    return f"{per_s / 1e9:.3g} GFLOP/s" if name in _COMPUTING else f"{per_s / 1e9:.3g} GB/s"


def _assumed(name: str) -> Cost:
    if name.startswith(_EXCHANGE):
        return ASSUMED.all_to_all
    cost: Cost | None = getattr(ASSUMED, name)
    return cost or ASSUMED.expert_flops


def _measurements(name: str, points: _Points, cost: Cost) -> Iterator[Measurement]:
    """Each point of a cost with its samples, and the fitted line."""
    kind = "operations" if name in _COMPUTING else "bytes"
    samples: dict[float, list[float]] = {}
    for amount, spent in points:
        samples.setdefault(amount, []).append(spent)
    for amount, times in samples.items():
        yield measured(name, times, "s", parameters={kind: amount})
    yield derived("latency", cost.latency_s, "s", parameters={"cost": name})
    if math.isfinite(cost.per_s):
        yield derived("rate", cost.per_s, f"{kind}/s", parameters={"cost": name})


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
            states = np.full((_uncached(4 * size), 4, size // 4), 1e-3, np.float32)
            step = _in_turns([partial(_native.adamw, *state, row) for state in states])
            steps += [(size // 4 * 28, spent) for spent in _timed(step, repeats)]
    finally:
        engine.close()
    return {"copy": copies, "adamw": steps}


# Computation ------------------------------------------------------------------------------------------------


def _computation(bench: MachineBench, model: ModelConfig) -> tuple[int, dict[str, _Points]]:
    """Bytes of the process with torch and its libraries, before it computes, and the points."""
    import torch

    process, before = resident_bytes(), torch.get_num_threads()
    if bench.threads:
        torch.set_num_threads(bench.threads)
    try:
        dense = _dense_points(model, bench.repeats)
        return process, {"dense_flops": dense, **_expert_points(model, bench.repeats)}
    finally:
        torch.set_num_threads(before)


def _dense_points(model: ModelConfig, repeats: int) -> _Points:
    """One dense block, forward and backward: 6 operations a parameter and token, and those of attention. Two passes."""
    import torch

    from tierstore.model.attention import rotary_tables
    from tierstore.model.transformer import Block
    from tierstore.moe.router import NoiseKey

    positions, d, dtype = model.seq_len, model.d_model, model.compute_dtype.torch
    block = Block(replace(model, d_ff_dense=2 * d), 0, None).to(dtype)
    cos, sin = rotary_tables(positions, model.head_dim, model.rope_theta)
    numel = sum(parameter.numel() for parameter in block.parameters())
    points: _Points = []
    for batch in (1, 2, 4, 8):
        x = torch.randn(batch, positions, d, dtype=dtype, requires_grad=True)

        def work(x: torch.Tensor = x) -> None:
            y, _ = block(x, cos, sin, NoiseKey())
            torch.autograd.backward(y.sum())

        # One pass is half of this on average: forward 2, backward 4 of the 6 operations.
        flops = 6 * batch * positions * (numel + positions * d)
        points += [(flops / 2, spent / 2) for spent in _timed(work, repeats)]
    return points


def _expert_points(model: ModelConfig, repeats: int) -> dict[str, _Points]:
    """One expert by its rows: forward, backward, and the mean of both."""
    import torch

    from tierstore.moe.experts import Workspace, backward_expert, forward_expert

    shape, dtype = model.expert_shape, model.compute_dtype.torch
    count = _uncached(shape.numel * dtype.itemsize)
    flats = [torch.randn(shape.numel).to(dtype) for _ in range(count)]
    gradients = torch.empty(shape.numel, dtype=dtype)
    points: dict[str, _Points] = {"expert_flops": [], "expert_forward": [], "expert_backward": []}
    for rows in (16, 64, 256, 1024):
        x = torch.randn(rows, shape.d_model, dtype=dtype)
        inner, out = x.new_empty(rows, shape.inner_rows), torch.empty_like(x)
        weight, grad_out = torch.ones(rows, dtype=dtype), torch.randn_like(x)
        work = Workspace(shape, rows, x, inner=2, hidden=2)

        forward = [partial(forward_expert, shape, flat, x, inner, out, work) for flat in flats]
        call = partial(backward_expert, shape, weights=(weight, torch.empty(rows)))
        backward = [partial(call, flat, gradients, x, inner, grad_out, out, work) for flat in flats]
        flops = 2 * rows * shape.numel
        there, back = (_timed(_in_turns(calls), repeats) for calls in (forward, backward))
        points["expert_forward"] += [(flops, spent) for spent in there]
        points["expert_backward"] += [(2 * flops, spent) for spent in back]
        points["expert_flops"] += [(1.5 * flops, sum(both) / 2) for both in zip(there, back, strict=True)]
    return points


# Collectives ------------------------------------------------------------------------------------------------


def _collectives(bench: MachineBench) -> dict[str, _Points]:
    sizes = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
    request = {"links": as_dict(bench.train.links), "repeats": bench.repeats, "sizes": sizes}
    points: dict[str, _Points] = {}
    for count in _counts(bench.ranks):
        with AskedRanks("tierstore.bench.machine", count) as ranks:
            answers = ranks.ask([request] * count)
        found: dict[str, _Points] = {
            name: [(amount, spent) for amount, spent in pairs] for name, pairs in answers[0].items()
        }
        points[f"{_EXCHANGE}{count}"] = found["all_to_all"]
    return found | points


def collective_times(
    group: RankGroup, sizes: Sequence[int], repeats: int
) -> dict[str, list[tuple[int, float]]]:
    """Seconds of gathers, reduce-scatters and all-to-alls in which each rank sends about ``sizes`` bytes."""
    import torch

    found: dict[str, list[tuple[int, float]]] = {"gather": [], "reduce_scatter": [], "all_to_all": []}
    others = group.size - 1
    for size in sizes:
        numel = max(size // 4 // others, 1)
        piece, whole = torch.zeros(numel), torch.zeros(numel * group.size)
        rows, received = torch.zeros(group.size * numel), torch.empty(group.size * numel)
        splits = [numel] * group.size
        works: dict[str, Callable[[], Work]] = {
            "gather": lambda w=whole, p=piece: group.all_gather(w, p),  # type: ignore[misc]
            "reduce_scatter": lambda w=whole, p=piece: group.reduce_scatter(w, p),  # type: ignore[misc]
            "all_to_all": lambda o=received, i=rows, s=splits: group.all_to_all(o, i, s, s),  # type: ignore[misc]
        }
        for turn in range(repeats + 1):
            for name, issue in works.items():
                group.barrier()
                started = time.perf_counter()
                issue().wait()
                if turn:  # the first is slower, since connections are made
                    found[name].append((numel * others * 4, time.perf_counter() - started))
    return found


def _answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    import torch

    from tierstore.parallel.config import ParallelConfig
    from tierstore.parallel.launching import launch
    from tierstore.parallel.limited import limited_groups

    torch.set_num_threads(1)
    for request in requests:
        groups = limited_groups(from_dict(LinksConfig, request["links"]))
        with launch(ParallelConfig(timeout_s=60.0), device="cpu", make_group=groups) as mesh:
            yield collective_times(mesh.world, request["sizes"], request["repeats"])


if __name__ == "__main__":
    serve(_answers)
