"""The speed of the native AdamW, against torch's fused AdamW and the machine's copy bandwidth.

Each round measures every program once, in turn, so that a drift in the machine's speed affects them alike.
Figures are medians over the rounds with their spread; a ratio is the median of the rounds' ratios.

Also measured: the replay of one record of ``RECORD_PARAMETERS`` by an engine with the store's default settings, against
the read of such a record from a file (12 bytes a parameter, many reads in flight, bypassing the page cache).

Programs: ``copy`` (memory to memory), ``torch`` (``torch.optim.AdamW(fused=True)``), ``step`` (one step),
``replay`` (``REPLAYED`` missed steps in one pass, without a gradient) and ``subnormal`` (the same with
moments that are subnormal, or become so). ``bf16``, ``bf16_replay``, ``int8`` and ``int8_replay`` are step and replay
with narrow moments, over the same weights and gradients.

A step reads weight, exp_avg, exp_avg_sq and grad and writes the first three: 28 bytes a parameter in fp32, 20 with
bf16 moments, 16 plus scales with int8. A copy counts each byte once read and once written. The processor's read of a
destination before writing it is not counted, and only the copy has such a destination: a step in place may exceed the
copy.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.bench.documents import Better, derived, measured
from tierstore.bench.harness import Benchmark, Found, Progress, ratios
from tierstore.bench.probes import Bytes, DiskProbe
from tierstore.config import PathKind, check_least, option
from tierstore.store.config import IoConfig, tune
from tierstore.store.opening import make_engine

_STEP_BYTES = 28  # per parameter, like the following
_NARROW_BYTES = {"bf16": 20.0, "int8": 16 + 16 / _native.MOMENT_BLOCK}
_COPIED_BYTES = 8
_GRADIENT_BYTES = 4
REPLAYED = 16
RECORD_PARAMETERS = 1 << 20
_OF_TORCH = 0.95  # least speed to reach
_OF_COPY = 0.9  # of memory bandwidth, with bf16 moments
_READ_BYTES = 256 << 20
_PROBE_BYTES = 1 << 30

_Array = npt.NDArray[np.float32]
#: One moment of all parameters, in one of the formats.
_Moments = _Array | npt.NDArray[np.uint16] | tuple[npt.NDArray[np.uint8], _Array]
_NARROW = (_native.MomentFormat.BF16, _native.MomentFormat.INT8)
_LR, _BETA1, _BETA2, _EPS, _DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01


@dataclass(frozen=True, kw_only=True)
class AdamWBench(Benchmark):
    """The native AdamW against torch's fused AdamW, the machine's copy bandwidth, and a read from disk.

    The first round is not counted. Needs about 26 bytes a parameter.
    """

    parameters: int = option(100_000_000, "fp32 parameters.")
    threads: int = option(2)
    repeats: int = option(7, "Rounds.")
    store: Path = option(Path(), "Directory of the record read.", path=PathKind.EXISTING_DIRECTORY)

    def __post_init__(self) -> None:
        check_least(self, 1, "parameters", "threads", "repeats")

    def run(self, progress: Progress) -> Found:
        """Run the benchmark. Sets torch's thread count meanwhile."""
        import torch

        threads_before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with ThreadPoolExecutor(self.threads) as pool:
                samples = _measure(self.parameters, self.threads, self.repeats, pool)
            record = _record(self.store, self.repeats)
        finally:
            torch.set_num_threads(threads_before)
        return found_in(samples, self.parameters, threads=self.threads, record=record)


def found_in(
    samples: Mapping[str, Sequence[float]],
    parameters: int,
    *,
    threads: int,
    record: Mapping[str, Sequence[float]],
) -> Found:
    """Evaluate ``samples``, the seconds of each program in each round; ``record``: those of its replay and its read."""
    import torch

    compared = [
        _Ratio("speed_to_torch", "speed to torch's", "torch", "step", better=Better.HIGHER, target=_OF_TORCH),
        _Ratio(
            "speed_to_copy", "speed to copy's", "copy", "step", _STEP_BYTES / _COPIED_BYTES, Better.HIGHER
        ),
        _Ratio("replay_to_step", "replay to one step", "replay", "step"),
        _Ratio("subnormal_to_replay", "subnormal to normal replay", "subnormal", "replay"),
    ]
    # Without a gradient, 4 of the bytes are not read.
    moved: dict[str, float] = {"copy": _COPIED_BYTES}
    moved |= dict.fromkeys(("replay", "subnormal"), _STEP_BYTES - _GRADIENT_BYTES)
    for name, nbytes in _NARROW_BYTES.items():
        target = _OF_COPY if name == "bf16" else None
        scale = nbytes / _COPIED_BYTES
        compared += [
            _Ratio(
                f"{name}_speed_to_copy", f"{name} speed to copy's", "copy", name, scale, Better.HIGHER, target
            ),
            _Ratio(f"{name}_to_step", f"{name} to fp32 step", name, "step"),
            _Ratio(f"{name}_replay_to_replay", f"{name} to fp32 replay", f"{name}_replay", "replay"),
        ]
        moved |= {name: nbytes, f"{name}_replay": nbytes - _GRADIENT_BYTES}
    rounds = {one.key: ratios(samples[one.over], samples[one.under], one.scale) for one in compared}
    return Found(
        figures={
            "bench": "adamw",
            "parameters": parameters,
            "threads": threads,
            "repeats": len(samples["step"]),
            "instruction_set": _native.instruction_set().name.lower(),
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
            "torch_version": torch.__version__,
            "replayed_steps": REPLAYED,
            "bytes_per_parameter": _STEP_BYTES,
            **{
                name: _times(seconds, parameters, moved.get(name, _STEP_BYTES))
                for name, seconds in samples.items()
            },
            **{f"{key}_ratio": statistics.median(values) for key, values in rounds.items()},
            "record_parameters": RECORD_PARAMETERS,
            "record_bytes": RECORD_PARAMETERS * 12,
            "record_replay_s": statistics.median(record["replay"]),
            "record_replay_samples_s": record["replay"],
            "record_read_s": statistics.median(record["read"]),
            "record_read_samples_s": record["read"],
            "record_replay_to_read_ratio": statistics.median(ratios(record["replay"], record["read"])),
        },
        measurements=[
            *(
                measured("pass over all parameters", spent, "s", parameters={"contestant": name})
                for name, spent in samples.items()
            ),
            *(derived(one.name, rounds[one.key], "ratio", one.better, target=one.target) for one in compared),
            *(
                measured("record", spent, "s", parameters={"operation": name})
                for name, spent in record.items()
            ),
        ],
    )


@dataclass(frozen=True)
class _Ratio:
    """A ratio of two programs' seconds, round by round: its figure's key, and its name as a measurement."""

    key: str
    name: str
    over: str
    under: str
    scale: float = 1.0
    better: Better = Better.LOWER
    target: float | None = None


def _times(samples_s: Sequence[float], parameters: int, moved_bytes: float) -> dict[str, object]:
    """Summarise one program's seconds for all parameters; ``moved_bytes``: bytes that it reads and writes per parameter."""
    median_s = statistics.median(samples_s)
    return {
        "samples_s": samples_s,
        "median_s": median_s,
        "min_s": min(samples_s),
        "max_s": max(samples_s),
        "median_bytes_per_s": moved_bytes * parameters / median_s,
        "s_per_parameter": median_s / parameters,
    }


def _record(directory: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds to replay one record, as the store's engine does, and to read it, in turn."""
    section = RECORD_PARAMETERS * 4
    nbytes = section * 3
    arena = _native.Arena(nbytes, _native.HugePages.AUTO)
    parts = [_native.Buffer(arena, [(i * section, section)], section) for i in range(3)]
    for part in parts:
        part.array().view(np.float32)[:] = 1e-3
    replays, reads = [], []
    with (
        contextlib.closing(make_engine(IoConfig(), tune(IoConfig(), directory))) as engine,
        contextlib.closing(DiskProbe(directory, _PROBE_BYTES, (nbytes,), IoConfig())) as probe,
    ):
        for _ in range(repeats):
            start = time.perf_counter()
            engine.wait(engine.adamw(parts[:1], parts[1], parts[2], None, _steps(REPLAYED)))
            replays.append(time.perf_counter() - start)
            reads.append(nbytes / probe.disk_bytes_per_s(Bytes(_READ_BYTES, 0)))
    return {"replay": replays, "read": reads}


class _Memory:
    """The memory that all programs work on, in equal parts on the threads of ``pool``."""

    def __init__(self, parameters: int, threads: int, pool: ThreadPoolExecutor) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(parameters, generator=generator)
        theirs = torch.nn.Parameter(torch.randn(parameters, generator=generator))
        theirs.grad = gradient
        self.optimizer = torch.optim.AdamW(
            [theirs], lr=_LR, betas=(_BETA1, _BETA2), eps=_EPS, weight_decay=_DECAY, fused=True
        )
        self.optimizer.step()  # makes torch's state
        # The same memory for both: the placement of pages matters more than the differences measured here.
        state = self.optimizer.state[theirs]
        self._weight: _Array = theirs.detach().numpy()
        self._exp_avg: _Array = state["exp_avg"].numpy()
        self._exp_avg_sq: _Array = state["exp_avg_sq"].numpy()
        self._grad: _Array = gradient.numpy()
        self._copied = np.empty_like(self._weight)
        moments = (_native.Moment.EXP_AVG, self._exp_avg), (_native.Moment.EXP_AVG_SQ, self._exp_avg_sq)
        self._moments: dict[_native.MomentFormat, list[_Moments]] = {
            _native.MomentFormat.FP32: [self._exp_avg, self._exp_avg_sq],
            **{form: [_encoded(form, *pair) for pair in moments] for form in _NARROW},
        }
        # Threads begin at blocks of 8-bit moments.
        whole = _native.MOMENT_BLOCK
        bounds = [min(-(-parameters * i // threads // whole) * whole, parameters) for i in range(threads + 1)]
        self._parts = [slice(a, b) for a, b in pairwise(bounds) if a < b]
        self._pool = pool

    def _everywhere(self, work: Callable[[slice], None]) -> None:
        for future in [self._pool.submit(work, part) for part in self._parts]:
            future.result()

    def adamw(self, form: _native.MomentFormat, steps: _Array) -> None:
        """tierstore's AdamW with moments in ``form``: one step with the gradient, or several without."""
        exp_avg, exp_avg_sq = self._moments[form]

        def work(part: slice) -> None:
            _native.adamw(
                self._weight[part],
                _sliced(exp_avg, part),
                _sliced(exp_avg_sq, part),
                self._grad[part] if len(steps) == 1 else None,
                steps,
                last_step=1 + len(steps),
                first=part.start,
            )

        self._everywhere(work)

    def fill(self, exp_avg: float, exp_avg_sq: float) -> None:
        def work(part: slice) -> None:
            self._exp_avg[part] = exp_avg
            self._exp_avg_sq[part] = exp_avg_sq

        self._everywhere(work)

    def copy(self) -> None:
        self._everywhere(lambda part: np.copyto(self._copied[part], self._weight[part]))


def _measure(parameters: int, threads: int, repeats: int, pool: ThreadPoolExecutor) -> dict[str, list[float]]:
    """Seconds of each program in each round."""
    memory = _Memory(parameters, threads, pool)
    one, missed = _steps(1), _steps(REPLAYED)
    programs: dict[str, Callable[[], object]] = {
        "copy": memory.copy,
        "torch": memory.optimizer.step,
        "step": partial(memory.adamw, _native.MomentFormat.FP32, one),
        "replay": partial(memory.adamw, _native.MomentFormat.FP32, missed),
        "subnormal": partial(memory.adamw, _native.MomentFormat.FP32, missed),
    }
    for form in _NARROW:
        programs[form.name.lower()] = partial(memory.adamw, form, one)
        programs[f"{form.name.lower()}_replay"] = partial(memory.adamw, form, missed)
    # Set up untimed. The subnormal replay starts from an exp_avg that falls below the smallest normal fp32, 1.2e-38, on
    # its way, and an exp_avg_sq that is already below it.
    moments = {"replay": (1e-3, 1e-6), "subnormal": (2e-38, 1e-40)}
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, work in programs.items():
            if name in moments:
                memory.fill(*moments[name])
            start = time.perf_counter()
            work()
            if turn > 0:
                samples[name].append(time.perf_counter() - start)
        memory.fill(1e-3, 1e-6)
    return samples


def _encoded(form: _native.MomentFormat, moment: _native.Moment, values: _Array) -> _Moments:
    out: npt.NDArray[np.uint16] | tuple[npt.NDArray[np.uint8], _Array]
    if form is _native.MomentFormat.BF16:
        out = np.empty(values.size, np.uint16)
    else:
        blocks = -(-values.size // _native.MOMENT_BLOCK)
        out = np.empty(values.size, np.uint8), np.empty(blocks, np.float32)
    _native.encode_moment(moment, out, values)
    return out


def _sliced(moment: _Moments, part: slice) -> _Moments:
    if isinstance(moment, tuple):
        block = _native.MOMENT_BLOCK
        return moment[0][part], moment[1][part.start // block : -(-part.stop // block)]
    return moment[part]


def _steps(count: int) -> _Array:
    """``count`` steps, float32[count, 7], in the order of the kernel's AdamWStep."""
    rows = [
        (_LR, _BETA1, _BETA2, _EPS, _DECAY, 1 - _BETA1**t, (1 - _BETA2**t) ** 0.5)
        for t in range(2, 2 + count)
    ]
    return np.array(rows, np.float32)
