"""Products with weights in 8 and 4 bits, beside torch's in bf16 and a copy of memory; and how far off they are.

Each round computes ``y = x W^T`` with each of several matrices once, with every contestant in turn, for each number of
rows of x. The matrices together are larger than caches, so that with one row (decoding) what counts is how fast weights are
read. Figures are medians over the rounds; a ratio is the median of the rounds' ratios.

Errors are those of normally distributed weights: of the weights themselves (root mean square, relative to theirs), and of a
product in fp32 against fp64 with the same dequantised weights (largest, relative to the sum of the products' magnitudes).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tierstore import _native
from tierstore.bench.checks import at_least
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, ratios
from tierstore.quant.layout import CodeFormat, PartKind, QuantizedLayout, WeightPart
from tierstore.quant.values import dequantize, quantize
from tierstore.quant.weights import QuantizedWeights

#: Names of the contestants beside the formats of codes.
COPY, TORCH = "copy", "bf16"


@dataclass(frozen=True, kw_only=True)
class ProductTimes(Figures):
    """Products with all matrices once. ``copy`` moves the bytes of the matrices in bf16, and reads each byte once."""

    contestant: str
    rows_count: int
    samples_s: Sequence[float]
    median_s: float
    weight_bytes: int
    weight_bytes_per_s: float
    flops_per_s: float
    speed_to_torch_ratio: float
    bandwidth_to_copy_ratio: float


@dataclass(frozen=True, kw_only=True)
class FormatError(Figures):
    """Of one format. ``bytes_per_parameter``: of the weights, with their scales."""

    codes: CodeFormat
    bytes_per_parameter: float
    weight_error_ratio: float
    product_error_ratio: float


@dataclass(frozen=True, kw_only=True)
class QuantResult(Figures):
    """What ``run`` found."""

    bench: str = "quant"
    inputs_count: int
    outputs_count: int
    matrices_count: int
    threads: int
    repeats: int
    instruction_set: str
    torch_version: str
    products: Sequence[ProductTimes]
    errors: Sequence[FormatError]
    rounds: Mapping[str, Sequence[float]] = field(metadata=INTERNAL)


def run(
    *,
    inputs: int = 2048,
    outputs: int = 1536,
    rows: Sequence[int] = (1, 8, 64),
    weight_bytes: int = 256 << 20,
    threads: int = 2,
    repeats: int = 7,
) -> QuantResult:
    """Measures matrices of ``outputs`` x ``inputs``, as many as have ``weight_bytes`` in bf16, in ``repeats`` rounds after
    one that is not counted. Sets torch's thread count for its duration. Raises ConfigError.
    """
    at_least(1, inputs=inputs, outputs=outputs, threads=threads, repeats=repeats, rows=min(rows, default=0))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with closing(_native.QuantProducts(threads)) as products:
            memory = _Memory(inputs, outputs, max(weight_bytes // (2 * inputs * outputs), 1), products)
            errors = [memory.error(codes) for codes in CodeFormat]
            samples = {m: _measure(memory, m, repeats) for m in rows}
    finally:
        torch.set_num_threads(threads_before)
    made, rounds = figures(samples, memory.sizes, 2 * memory.count * inputs * outputs)
    return QuantResult(
        inputs_count=inputs,
        outputs_count=outputs,
        matrices_count=memory.count,
        threads=threads,
        repeats=repeats,
        instruction_set=_native.instruction_set().name.lower(),
        torch_version=torch.__version__,
        products=made,
        errors=errors,
        rounds=rounds,
    )


Samples = Mapping[str, Sequence[float]]


def figures(
    samples: Mapping[int, Samples], sizes: Mapping[str, int], flops: int
) -> tuple[list[ProductTimes], dict[str, list[float]]]:
    """Times by rows and contestant, and the ratios of each round. ``sizes``: bytes of the weights; ``flops``: of one row."""
    made: list[ProductTimes] = []
    rounds: dict[str, list[float]] = {}
    for m, by_name in samples.items():
        for name, seconds in by_name.items():
            speeds = ratios(by_name[TORCH], seconds)
            bandwidths = ratios(by_name[COPY], seconds, sizes[name] / sizes[COPY])
            rounds |= {
                f"{name} speed to torch, {m} rows": speeds,
                f"{name} bandwidth to copy, {m} rows": bandwidths,
            }
            median_s = statistics.median(seconds)
            made.append(
                ProductTimes(
                    contestant=name,
                    rows_count=m,
                    samples_s=seconds,
                    median_s=median_s,
                    weight_bytes=sizes[name],
                    weight_bytes_per_s=sizes[name] / median_s,
                    flops_per_s=0.0 if name == COPY else m * flops / median_s,
                    speed_to_torch_ratio=statistics.median(speeds),
                    bandwidth_to_copy_ratio=statistics.median(bandwidths),
                )
            )
    return made, rounds


class _Memory:
    """The same matrices in bf16 and as codes."""

    def __init__(self, inputs: int, outputs: int, count: int, products: _native.QuantProducts) -> None:
        generator = torch.Generator().manual_seed(0)
        self.count, self._inputs, self._generator = count, inputs, generator
        self.narrow = [torch.randn(outputs, inputs, generator=generator).bfloat16() for _ in range(count)]
        self.codes: dict[CodeFormat, list[QuantizedWeights]] = {}
        for codes in CodeFormat:
            layout = QuantizedLayout(codes, (WeightPart(PartKind.MATRIX, outputs, inputs),))
            self.codes[codes] = [self._quantized(layout, matrix, products) for matrix in self.narrow]
        self._copied = torch.empty_like(self.narrow[0])
        plain = 2 * inputs * outputs * count
        self.sizes = {COPY: plain, TORCH: plain} | {
            codes.value: sum(weights.layout.nbytes for weights in made) for codes, made in self.codes.items()
        }

    @staticmethod
    def _quantized(
        layout: QuantizedLayout, matrix: Tensor, products: _native.QuantProducts
    ) -> QuantizedWeights:
        data = np.empty(layout.nbytes, np.uint8)
        quantize(layout, matrix.float().numpy().ravel(), data, name="matrix")
        return QuantizedWeights(layout, torch.from_numpy(data), products)

    def error(self, codes: CodeFormat) -> FormatError:
        """How far off the first matrix, and a product with it, is."""
        weights, exact = self.codes[codes][0], self.narrow[0].float()
        kept = torch.from_numpy(dequantize(weights.layout, weights.data.numpy())).view_as(exact)
        x = torch.randn(8, self._inputs, generator=self._generator)
        y = x.new_empty(8, exact.shape[0])
        weights.multiply(0, x, y)
        wide, magnitude = x.double() @ kept.double().t(), x.double().abs() @ kept.double().abs().t()
        return FormatError(
            codes=codes,
            bytes_per_parameter=weights.layout.nbytes / exact.numel(),
            weight_error_ratio=float((kept - exact).norm() / exact.norm()),
            product_error_ratio=float(((y.double() - wide).abs() / magnitude).max()),
        )

    def programs(self, rows: int) -> dict[str, Callable[[], None]]:
        """What each contestant does in a round."""
        x = torch.randn(rows, self._inputs, generator=self._generator).bfloat16()
        y = x.new_empty(rows, self.narrow[0].shape[0])

        def copy() -> None:
            for matrix in self.narrow:
                self._copied.copy_(matrix)

        def plain() -> None:
            for matrix in self.narrow:
                torch.mm(x, matrix.t(), out=y)

        def coded(codes: CodeFormat) -> Callable[[], None]:
            def work() -> None:
                for weights in self.codes[codes]:
                    weights.multiply(0, x, y)

            return work

        return {COPY: copy, TORCH: plain} | {codes.value: coded(codes) for codes in CodeFormat}


def _measure(memory: _Memory, rows: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round."""
    programs = memory.programs(rows)
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, work in programs.items():
            start = time.perf_counter()
            work()
            if turn > 0:
                samples[name].append(time.perf_counter() - start)
    return samples


def measurements(result: QuantResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for times in result.products:
        of: dict[str, float | str] = {"contestant": times.contestant, "rows": times.rows_count}
        yield measured("products with all matrices", times.samples_s, "s", Better.LOWER, parameters=of)
    for name, values in result.rounds.items():
        yield derived(name, values, "ratio", Better.HIGHER)
    for error in result.errors:
        of = {"codes": error.codes.value}
        yield derived("error of weights", error.weight_error_ratio, "ratio", Better.LOWER, parameters=of)
        yield derived("error of a product", error.product_error_ratio, "ratio", Better.LOWER, parameters=of)
