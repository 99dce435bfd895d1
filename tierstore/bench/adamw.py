"""How fast the native AdamW is: against torch's fused AdamW and against the machine's copy bandwidth.

Each round measures every program once, in turn, so that a machine whose speed drifts treats them alike.
Figures are medians over the rounds with their spread; a ratio is the median of the rounds' ratios.

With a directory, also: the replay of one record of ``RECORD_PARAMETERS`` by an engine with the store's default
settings, against the read of such a record from a file there (12 bytes a parameter, many reads in flight, past the
page cache).

Programs: ``copy`` (memory to memory), ``torch`` (``torch.optim.AdamW(fused=True)``), ``step`` (one step),
``replay`` (``REPLAYED`` missed steps in one pass, without a gradient) and ``subnormal`` (the same over
moments that are subnormal, or become so). ``bf16``, ``bf16_replay``, ``int8`` and ``int8_replay`` are step and replay
with narrow moments, over the same weights and gradients.

A step reads weight, exp_avg, exp_avg_sq and grad and writes the first three: 28 bytes a parameter in fp32, 20 with
bf16 moments, 16 and the scales with int8. A copy counts each byte once read and once written. What a processor reads
of a destination before writing it is not counted, and only the copy has such a destination: a step in place may
exceed the copy.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.bench.checks import at_least
from tierstore.bench.probes.disk import Bytes, DiskProbe
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, prefixed, ratios
from tierstore.store.config import IoConfig, tune
from tierstore.store.opening import make_engine

BYTES_PER_PARAMETER = 28
REPLAYED = 16
RECORD_PARAMETERS = 1 << 20
NARROW_BYTES_PER_PARAMETER = {"bf16": 20.0, "int8": 16 + 16 / _native.MOMENT_BLOCK}
_COPIED_BYTES = 8  # a parameter
_GRADIENT_BYTES = 4
_OF_TORCH = 0.95  # the speed that is to be reached at least
_OF_COPY = 0.9  # of memory bandwidth, with bf16 moments
_READ_BYTES = 256 << 20
_PROBE_BYTES = 1 << 30

_Array = npt.NDArray[np.float32]
_LR, _BETA1, _BETA2, _EPS, _DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01


@dataclass(frozen=True, kw_only=True)
class ProgramTimes(Figures):
    """One program's seconds for all parameters, in each round."""

    samples_s: Sequence[float]
    median_s: float
    min_s: float
    max_s: float
    median_bytes_per_s: float
    s_per_parameter: float

    @staticmethod
    def of(samples_s: Sequence[float], parameters: int, moved_bytes: float) -> ProgramTimes:
        """``moved_bytes``: what the program reads and writes of a parameter."""
        median_s = statistics.median(samples_s)
        return ProgramTimes(
            samples_s=samples_s,
            median_s=median_s,
            min_s=min(samples_s),
            max_s=max(samples_s),
            median_bytes_per_s=moved_bytes * parameters / median_s,
            s_per_parameter=median_s / parameters,
        )


@dataclass(frozen=True, kw_only=True)
class RecordTimes(Figures):
    """Seconds to replay one record, as the store's engine does it, and to read it, in turn."""

    parameters: int
    bytes: int
    replay_s: float
    replay_samples_s: Sequence[float]
    read_s: float
    read_samples_s: Sequence[float]
    replay_to_read_ratio: float


@dataclass(frozen=True, kw_only=True)
class AdamWResult(Figures):
    """What ``run`` found. The ratios are medians of ``rounds``, each round's ratios."""

    bench: str = "adamw"
    parameters: int
    threads: int
    repeats: int
    instruction_set: str
    omp_wait_policy: str
    torch_version: str
    replayed_steps: int = REPLAYED
    bytes_per_parameter: int = BYTES_PER_PARAMETER
    programs: Mapping[str, ProgramTimes] = field(metadata=prefixed(""))
    rounds: Mapping[str, Sequence[float]] = field(metadata=INTERNAL)
    speed_to_torch_ratio: float
    speed_to_copy_ratio: float
    replay_to_step_ratio: float
    subnormal_to_replay_ratio: float
    bf16_speed_to_copy_ratio: float
    bf16_to_step_ratio: float
    bf16_replay_to_replay_ratio: float
    int8_speed_to_copy_ratio: float
    int8_to_step_ratio: float
    int8_replay_to_replay_ratio: float
    record: RecordTimes | None = field(default=None, metadata=prefixed("record_"))


def run(
    parameters: int = 100_000_000, threads: int = 2, repeats: int = 7, *, directory: Path | None = None
) -> AdamWResult:
    """Measures ``parameters`` fp32 parameters with ``threads`` threads for every program (ours: Python threads over equal
    parts, the GIL released), in ``repeats`` rounds after one that is not counted.

    Needs about 26 bytes a parameter. Sets torch's thread count for its duration. Raises ConfigError.
    """
    at_least(1, parameters=parameters, threads=threads, repeats=repeats)
    import torch

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ThreadPoolExecutor(threads) as pool:
            samples = _measure(parameters, threads, repeats, pool)
        record = None if directory is None else _record(directory, repeats)
    finally:
        torch.set_num_threads(threads_before)
    return figures(samples, parameters, threads=threads, record=record)


def figures(
    samples: Mapping[str, Sequence[float]],
    parameters: int,
    *,
    threads: int,
    record: RecordTimes | None = None,
) -> AdamWResult:
    """The result of ``samples``, the seconds of each program in each round."""
    import torch

    rounds = {
        "speed_to_torch": ratios(samples["torch"], samples["step"]),
        "speed_to_copy": ratios(samples["copy"], samples["step"], BYTES_PER_PARAMETER / _COPIED_BYTES),
        "replay_to_step": ratios(samples["replay"], samples["step"]),
        "subnormal_to_replay": ratios(samples["subnormal"], samples["replay"]),
    }
    # Without a gradient 4 of the bytes are not read.
    moved: dict[str, float] = {"copy": _COPIED_BYTES}
    moved |= dict.fromkeys(("replay", "subnormal"), BYTES_PER_PARAMETER - _GRADIENT_BYTES)
    for name, nbytes in NARROW_BYTES_PER_PARAMETER.items():
        rounds[f"{name}_speed_to_copy"] = ratios(samples["copy"], samples[name], nbytes / _COPIED_BYTES)
        rounds[f"{name}_to_step"] = ratios(samples[name], samples["step"])
        rounds[f"{name}_replay_to_replay"] = ratios(samples[f"{name}_replay"], samples["replay"])
        moved |= {name: nbytes, f"{name}_replay": nbytes - _GRADIENT_BYTES}
    medians: dict[str, Any] = {f"{name}_ratio": statistics.median(values) for name, values in rounds.items()}
    return AdamWResult(
        parameters=parameters,
        threads=threads,
        repeats=len(samples["step"]),
        instruction_set=_native.instruction_set().name.lower(),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", "unset"),
        torch_version=torch.__version__,
        programs={
            name: ProgramTimes.of(seconds, parameters, moved.get(name, BYTES_PER_PARAMETER))
            for name, seconds in samples.items()
        },
        record=record,
        rounds=rounds,
        **medians,
    )


def _record(directory: Path, repeats: int) -> RecordTimes:
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
    return RecordTimes(
        parameters=RECORD_PARAMETERS,
        bytes=nbytes,
        replay_s=statistics.median(replays),
        replay_samples_s=replays,
        read_s=statistics.median(reads),
        read_samples_s=reads,
        replay_to_read_ratio=statistics.median(ratios(replays, reads)),
    )


class _Memory:
    """What all programs work on, over equal parts on the threads of ``pool``."""

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
        # The very same memory for both: the placement of pages is worth more than what is measured here.
        state = self.optimizer.state[theirs]
        self._weight: _Array = theirs.detach().numpy()
        self._exp_avg: _Array = state["exp_avg"].numpy()
        self._exp_avg_sq: _Array = state["exp_avg_sq"].numpy()
        self._grad: _Array = gradient.numpy()
        self._copied = np.empty_like(self._weight)
        self._narrow = {
            form: [_encoded(form, *pair) for pair in self._moments()]
            for form in (_native.MomentFormat.BF16, _native.MomentFormat.INT8)
        }
        # Threads begin at blocks of 8-bit moments.
        whole = _native.MOMENT_BLOCK
        bounds = [min(-(-parameters * i // threads // whole) * whole, parameters) for i in range(threads + 1)]
        self._parts = [slice(a, b) for a, b in pairwise(bounds) if a < b]
        self._pool = pool

    def _everywhere(self, work: Callable[[slice], None]) -> None:
        for future in [self._pool.submit(work, part) for part in self._parts]:
            future.result()

    def adamw(self, steps: _Array) -> None:
        """Ours: one step with the gradient; several without one."""

        def work(part: slice) -> None:
            gradient = self._grad[part] if len(steps) == 1 else None
            _native.adamw(self._weight[part], self._exp_avg[part], self._exp_avg_sq[part], gradient, steps)

        self._everywhere(work)

    def _moments(self) -> list[tuple[_native.Moment, _Array]]:
        return [(_native.Moment.EXP_AVG, self._exp_avg), (_native.Moment.EXP_AVG_SQ, self._exp_avg_sq)]

    def narrow_adamw(self, form: _native.MomentFormat, steps: _Array) -> None:
        """``adamw`` with moments in ``form``."""
        exp_avg, exp_avg_sq = self._narrow[form]

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
        "step": lambda: memory.adamw(one),
        "replay": lambda: memory.adamw(missed),
        "subnormal": lambda: memory.adamw(missed),
    }
    for form in (_native.MomentFormat.BF16, _native.MomentFormat.INT8):
        programs[form.name.lower()] = partial(memory.narrow_adamw, form, one)
        programs[f"{form.name.lower()}_replay"] = partial(memory.narrow_adamw, form, missed)
    # Set up untimed. The last replay starts from an exp_avg that falls below the smallest normal fp32, 1.2e-38, on its
    # way, and an exp_avg_sq that lies there already.
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


_Narrow = npt.NDArray[np.uint16] | tuple[npt.NDArray[np.uint8], _Array]


def _encoded(form: _native.MomentFormat, moment: _native.Moment, values: _Array) -> _Narrow:
    out: _Narrow
    if form is _native.MomentFormat.BF16:
        out = np.empty(values.size, np.uint16)
    else:
        blocks = -(-values.size // _native.MOMENT_BLOCK)
        out = np.empty(values.size, np.uint8), np.empty(blocks, np.float32)
    _native.encode_moment(moment, out, values)
    return out


def _sliced(moment: _Narrow, part: slice) -> _Narrow:
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


def measurements(result: AdamWResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    samples = {name: times.samples_s for name, times in result.programs.items()}
    for name, seconds in samples.items():
        yield measured(
            "pass over all parameters", seconds, "s", Better.LOWER, parameters={"contestant": name}
        )
    found = result.rounds
    yield derived("speed to torch's", found["speed_to_torch"], "ratio", Better.HIGHER, target=_OF_TORCH)
    yield derived("speed to copy's", found["speed_to_copy"], "ratio", Better.HIGHER)
    yield derived("replay to one step", found["replay_to_step"], "ratio", Better.LOWER)
    yield derived("subnormal to normal replay", found["subnormal_to_replay"], "ratio", Better.LOWER)
    for name in NARROW_BYTES_PER_PARAMETER:
        target = _OF_COPY if name == "bf16" else None
        yield derived(
            f"{name} speed to copy's", found[f"{name}_speed_to_copy"], "ratio", Better.HIGHER, target=target
        )
        yield derived(f"{name} to fp32 step", found[f"{name}_to_step"], "ratio", Better.LOWER)
        yield derived(f"{name} to fp32 replay", found[f"{name}_replay_to_replay"], "ratio", Better.LOWER)
    if (record := result.record) is not None:
        for what, seconds in (("replay", record.replay_samples_s), ("read", record.read_samples_s)):
            yield measured("record", seconds, "s", Better.LOWER, parameters={"operation": what})
