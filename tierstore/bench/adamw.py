"""How fast the native AdamW is: against torch's fused AdamW and against the machine's copy bandwidth.

Each round measures every contestant once, in turn, so that a machine whose speed drifts treats them alike.
Figures are medians over the rounds with their spread; a ratio is the median of the rounds' ratios.

With a directory, also: the replay of one record of ``RECORD_PARAMETERS`` by an engine with the store's default
settings, against the read of such a record from a file there (12 bytes a parameter, many reads in flight, past the
page cache).

Contestants: ``copy`` (memory to memory), ``torch`` (``torch.optim.AdamW(fused=True)``), ``step`` (one step),
``replay`` (``REPLAYED`` missed steps in one pass, without a gradient) and ``subnormal`` (the same over
moments that are subnormal, or become so).

A step reads weight, exp_avg, exp_avg_sq and grad and writes the first three: 28 bytes a parameter in fp32. A
copy counts each byte once read and once written. What a processor reads of a destination before writing it is
not counted, and only the copy has such a destination: a step in place may exceed the copy.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.bench.probes.disk import DiskProbe
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.training.bound import Bytes
from tierstore.errors import ConfigError
from tierstore.store.config import IoConfig
from tierstore.store.opening import make_engine
from tierstore.store.tuning import tune
from tierstore.units import format_bytes, format_seconds

__all__ = ["REPLAYED", "Lines", "measurements", "render", "run"]

BYTES_PER_PARAMETER = 28
REPLAYED = 16
RECORD_PARAMETERS = 1 << 20
_OF_TORCH = 0.95  # the speed that is to be reached at least
_READ_BYTES = 256 << 20
_PROBE_BYTES = 1 << 30

_Array = npt.NDArray[np.float32]
_LR, _BETA1, _BETA2, _EPS, _DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01


def run(
    parameters: int = 100_000_000, threads: int = 2, repeats: int = 7, *, directory: Path | None = None
) -> dict[str, Any]:
    """Measure, and return figures ready for JSON; keys name their units, ratios are plain numbers.

    ``parameters`` fp32 parameters, ``threads`` threads for every contestant (ours: Python threads over equal
    parts, the GIL released), ``repeats`` rounds after one that is not counted. Needs about 20 bytes a
    parameter. Sets torch's thread count for its duration. Raises ConfigError.
    """
    for name, value in (("parameters", parameters), ("threads", threads), ("repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{name}: expected at least 1, got {value}")
    import torch

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ThreadPoolExecutor(threads) as pool:
            samples = _measure(parameters, threads, repeats, pool)
        record = {} if directory is None else _record(directory, repeats)
    finally:
        torch.set_num_threads(threads_before)
    return {
        "bench": "adamw",
        "parameters": parameters,
        "threads": threads,
        "repeats": repeats,
        "instruction_set": _native.instruction_set().name.lower(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
        "torch_version": torch.__version__,
        "replayed_steps": REPLAYED,
        "bytes_per_parameter": BYTES_PER_PARAMETER,
        **_figures(samples, parameters),
        **record,
    }


def _record(directory: Path, repeats: int) -> dict[str, Any]:
    """Seconds to replay one record, as the store's engine does it, and to read it, in turn."""
    section = RECORD_PARAMETERS * 4
    nbytes = section * 3
    arena = _native.Arena(nbytes, _native.HugePages.AUTO)
    parts = [_native.Buffer(arena, [(i * section, section)], section) for i in range(3)]
    for part in parts:
        part.array().view(np.float32)[:] = 1e-3
    replays, reads = [], []
    with (
        contextlib.closing(make_engine(IoConfig(), tune(IoConfig(), directory))) as engine,
        DiskProbe(directory, _PROBE_BYTES, (nbytes,), IoConfig()) as probe,
    ):
        for _ in range(repeats):
            start = time.perf_counter()
            engine.wait(engine.adamw(parts[:1], parts[1], parts[2], None, _steps(REPLAYED)))
            replays.append(time.perf_counter() - start)
            reads.append(nbytes / probe.disk_bytes_per_s(Bytes(_READ_BYTES, 0)))
    return {
        "record_parameters": RECORD_PARAMETERS,
        "record_bytes": nbytes,
        "record_replay_s": statistics.median(replays),
        "record_replay_samples_s": replays,
        "record_read_s": statistics.median(reads),
        "record_read_samples_s": reads,
        "record_replay_to_read_ratio": statistics.median(a / b for a, b in zip(replays, reads, strict=True)),
    }


def _measure(parameters: int, threads: int, repeats: int, pool: ThreadPoolExecutor) -> dict[str, list[float]]:
    """Seconds of each contestant in each round."""
    import torch

    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(parameters, generator=generator)
    theirs = torch.nn.Parameter(torch.randn(parameters, generator=generator))
    theirs.grad = gradient
    optimizer = torch.optim.AdamW(
        [theirs], lr=_LR, betas=(_BETA1, _BETA2), eps=_EPS, weight_decay=_DECAY, fused=True
    )
    optimizer.step()  # makes torch's state
    # The very same memory for both: the placement of pages is worth more than what is measured here.
    weight = theirs.detach().numpy()
    exp_avg: _Array = optimizer.state[theirs]["exp_avg"].numpy()
    exp_avg_sq: _Array = optimizer.state[theirs]["exp_avg_sq"].numpy()
    grad = gradient.numpy()
    copied = np.empty_like(weight)
    bounds = [parameters * i // threads for i in range(threads + 1)]
    parts = [slice(a, b) for a, b in pairwise(bounds)]

    def everywhere(work: Callable[[slice], None]) -> None:
        for future in [pool.submit(work, part) for part in parts]:
            future.result()

    def ours(steps: _Array, gradient: _Array | None) -> Callable[[], None]:
        def work(part: slice) -> None:
            g = None if gradient is None else gradient[part]
            _native.adamw(weight[part], exp_avg[part], exp_avg_sq[part], g, steps)

        return lambda: everywhere(work)

    def fill(m: float, v: float) -> Callable[[], None]:
        def work(part: slice) -> None:
            exp_avg[part] = m
            exp_avg_sq[part] = v

        return lambda: everywhere(work)

    def copy(part: slice) -> None:
        np.copyto(copied[part], weight[part])

    nothing: Callable[[], None] = lambda: None  # noqa: E731
    # Name, what to set up untimed, what to time. The last replay starts from an exp_avg that falls below the
    # smallest normal fp32, 1.2e-38, on its way, and an exp_avg_sq that lies there already.
    contestants: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
        ("copy", nothing, lambda: everywhere(copy)),
        ("torch", nothing, lambda: _discard(optimizer.step())),
        ("step", nothing, ours(_steps(1), grad)),
        ("replay", fill(1e-3, 1e-6), ours(_steps(REPLAYED), None)),
        ("subnormal", fill(2e-38, 1e-40), ours(_steps(REPLAYED), None)),
    ]
    samples: dict[str, list[float]] = {name: [] for name, _, _ in contestants}
    for turn in range(repeats + 1):
        for name, prepare, work in contestants:
            prepare()
            start = time.perf_counter()
            work()
            if turn > 0:
                samples[name].append(time.perf_counter() - start)
        fill(1e-3, 1e-6)()
    return samples


def _discard(_: object) -> None:
    pass


def _steps(count: int) -> _Array:
    """``count`` steps, float32[count, 7], in the order of the kernel's AdamWStep."""
    rows = [
        (_LR, _BETA1, _BETA2, _EPS, _DECAY, 1 - _BETA1**t, (1 - _BETA2**t) ** 0.5)
        for t in range(2, 2 + count)
    ]
    return np.array(rows, np.float32)


def _figures(samples: dict[str, list[float]], parameters: int) -> dict[str, Any]:
    moved = {"copy": 8 * parameters}
    figures: dict[str, Any] = {}
    for name, seconds in samples.items():
        median = statistics.median(seconds)
        figures[name] = {
            "samples_s": seconds,
            "median_s": median,
            "min_s": min(seconds),
            "max_s": max(seconds),
            "median_bytes_per_s": moved.get(name, BYTES_PER_PARAMETER * parameters) / median,
            "s_per_parameter": median / parameters,
        }
    # Without a gradient 4 of the bytes are not read.
    for name in ("replay", "subnormal"):
        figures[name]["median_bytes_per_s"] *= (BYTES_PER_PARAMETER - 4) / BYTES_PER_PARAMETER

    def ratio(numerator: str, denominator: str) -> float:
        pairs = zip(samples[numerator], samples[denominator], strict=True)
        return statistics.median(a / b for a, b in pairs)

    figures["speed_to_torch_ratio"] = ratio("torch", "step")
    figures["speed_to_copy_ratio"] = ratio("copy", "step") * BYTES_PER_PARAMETER / 8
    figures["replay_to_step_ratio"] = ratio("replay", "step")
    figures["subnormal_to_replay_ratio"] = ratio("subnormal", "replay")
    return figures


def measurements(result: dict[str, Any]) -> list[Measurement]:
    """What ``run`` found, for a document."""
    samples = {name: result[name]["samples_s"] for name in ("copy", "torch", "step", "replay", "subnormal")}
    found = [
        measured("pass over all parameters", seconds, "s", Better.LOWER, parameters={"contestant": name})
        for name, seconds in samples.items()
    ]

    def ratios(numerator: str, denominator: str, scale: float = 1.0) -> list[float]:
        pairs = zip(samples[numerator], samples[denominator], strict=True)
        return [scale * a / b for a, b in pairs]

    speed = ratios("torch", "step")
    found += [
        derived("speed to torch's", speed, "ratio", Better.HIGHER, target=_OF_TORCH),
        derived("speed to copy's", ratios("copy", "step", BYTES_PER_PARAMETER / 8), "ratio", Better.HIGHER),
        derived("replay to one step", ratios("replay", "step"), "ratio", Better.LOWER),
        derived("subnormal to normal replay", ratios("subnormal", "replay"), "ratio", Better.LOWER),
    ]
    if "record_read_s" in result:
        found += [
            measured(
                "record",
                result[f"record_{what}_samples_s"],
                "s",
                Better.LOWER,
                parameters={"operation": what},
            )
            for what in ("replay", "read")
        ]
    return found


class Lines(Protocol):
    """Where figures are shown."""

    def line(self, text: str = "") -> None: ...

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None: ...


def render(result: dict[str, Any], output: Lines) -> None:
    """The environment, a table and the ratios, for people."""
    labels = {
        "copy": "copy",
        "torch": "torch fused AdamW",
        "step": "tierstore AdamW",
        "replay": f"{result['replayed_steps']} missed steps in one pass",
        "subnormal": "the same, subnormal moments",
    }
    rows = []
    for name, label in labels.items():
        row = result[name]
        seconds = [format_seconds(row[key]) for key in ("median_s", "min_s", "max_s")]
        speed = f"{format_bytes(row['median_bytes_per_s'])}/s"
        rows.append((label, *seconds, f"{row['s_per_parameter'] * 1e9:.3f}", speed))
    output.table(
        f"AdamW, {result['parameters']:,} fp32 parameters, {result['threads']} threads, "
        f"{result['instruction_set']}, torch {result['torch_version']}, "
        f"OMP_WAIT_POLICY {result['omp_wait_policy']}, {result['repeats']} rounds",
        ("", "median", "min", "max", "ns/parameter", "bytes/s"),
        rows,
    )
    output.line(
        f"of torch's speed {result['speed_to_torch_ratio']:.2f}, of copy bandwidth "
        f"{result['speed_to_copy_ratio']:.2f}; replay / step {result['replay_to_step_ratio']:.2f}, "
        f"subnormal / replay {result['subnormal_to_replay_ratio']:.2f}"
    )
    if "record_read_s" in result:
        output.line(
            f"a record of {format_bytes(result['record_bytes'])}: replay in the engine "
            f"{format_seconds(result['record_replay_s'])}, read {format_seconds(result['record_read_s'])}; "
            f"replay / read {result['record_replay_to_read_ratio']:.2f}"
        )
