"""Products with weights in 8 and 4 bits, beside torch's in bf16 and a copy of memory; and how large their errors are.

    python experiments/quant.py [--inputs 2048] [--outputs 1536] [--rows 1 8 64] [--threads 2]

Each round computes ``y = x W^T`` with each of several matrices once, in every format in turn, for each number of rows
of x. The matrices together are larger than caches, so that with one row (decoding) what counts is how fast weights are
read. Figures are medians over the rounds; a ratio is the median of the rounds' ratios. A copy moves the bytes of the
matrices in bf16, and reads each byte once.

Errors are those of normally distributed weights: of the weights themselves (root mean square, relative to theirs), and
of a product in fp32 against fp64 with the same dequantised weights (largest, relative to the sum of the products'
magnitudes).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from emulation import OUTPUT, finish, options, start, table
from torch import Tensor

from tierstore import _native
from tierstore.quant.layout import CodeFormat, PartKind, QuantizedLayout, WeightPart, dequantize, quantize
from tierstore.quant.weights import QuantizedWeights

COPY, TORCH = "copy", "bf16"


class Matrices:
    """The same matrices in bf16 and as codes."""

    def __init__(self, inputs: int, outputs: int, count: int, products: _native.QuantProducts) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._inputs = inputs
        self.narrow = [
            torch.randn(outputs, inputs, generator=self._generator).bfloat16() for _ in range(count)
        ]
        self.codes = {}
        for codes in CodeFormat:
            layout = QuantizedLayout(codes, (WeightPart(PartKind.MATRIX, outputs, inputs),))
            self.codes[codes] = [_quantized(layout, matrix, products) for matrix in self.narrow]
        plain = 2 * inputs * outputs * count
        self.nbytes = {COPY: plain, TORCH: plain} | {
            codes.value: sum(weights.layout.nbytes for weights in made) for codes, made in self.codes.items()
        }

    def error(self, codes: CodeFormat) -> dict[str, float]:
        """The errors of the first matrix, and of a product with it."""
        weights, exact = self.codes[codes][0], self.narrow[0].float()
        kept = torch.from_numpy(dequantize(weights.layout, weights.data.numpy())).view_as(exact)
        x = torch.randn(8, self._inputs, generator=self._generator)
        y = x.new_empty(8, exact.shape[0])
        weights.multiply(0, x, y)
        wide, magnitude = x.double() @ kept.double().t(), x.double().abs() @ kept.double().abs().t()
        return {
            "bytes_per_parameter": weights.layout.nbytes / exact.numel(),
            "weight_error_ratio": float((kept - exact).norm() / exact.norm()),
            "product_error_ratio": float(((y.double() - wide).abs() / magnitude).max()),
        }

    def measure(self, rows: int, repeats: int) -> dict[str, list[float]]:
        """Seconds of all products with ``rows`` rows, by format and round."""
        x = torch.randn(rows, self._inputs, generator=self._generator).bfloat16()
        y = x.new_empty(rows, self.narrow[0].shape[0])
        copied = torch.empty_like(self.narrow[0])
        programs: dict[str, Callable[[], object]] = {
            COPY: lambda: [copied.copy_(matrix) for matrix in self.narrow],
            TORCH: lambda: [torch.mm(x, matrix.t(), out=y) for matrix in self.narrow],
        }
        for codes, made in self.codes.items():
            programs[codes.value] = partial(_multiply, made, x, y)
        samples: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(repeats + 1):
            for name, program in programs.items():
                start = time.perf_counter()
                program()
                if turn > 0:
                    samples[name].append(time.perf_counter() - start)
        return samples


def _quantized(layout: QuantizedLayout, matrix: Tensor, products: _native.QuantProducts) -> QuantizedWeights:
    data = np.empty(layout.nbytes, np.uint8)
    quantize(layout, matrix.float().numpy().ravel(), data, name="matrix")
    return QuantizedWeights(layout, torch.from_numpy(data), products)


def figures(
    samples: Mapping[str, Sequence[float]], nbytes: Mapping[str, int], flops: int
) -> list[dict[str, Any]]:
    """Times, speeds and ratios by format. ``nbytes``: of the weights; ``flops``: of all products together."""
    rows = []
    for name, seconds in samples.items():
        median_s = statistics.median(seconds)
        to_torch = [plain / own for plain, own in zip(samples[TORCH], seconds, strict=True)]
        to_copy = [
            copy / own * nbytes[name] / nbytes[COPY] for copy, own in zip(samples[COPY], seconds, strict=True)
        ]
        rows.append(
            {
                "format": name,
                "samples_s": seconds,
                "median_s": median_s,
                "weight_bytes": nbytes[name],
                "weight_bytes_per_s": nbytes[name] / median_s,
                "flops_per_s": 0.0 if name == COPY else flops / median_s,
                "speed_to_torch_ratio": statistics.median(to_torch),
                "bandwidth_to_copy_ratio": statistics.median(to_copy),
            }
        )
    return rows


def _multiply(made: Sequence[QuantizedWeights], x: Tensor, y: Tensor) -> None:
    for weights in made:
        weights.multiply(0, x, y)


def main() -> None:
    asked = options(
        __doc__, inputs=2048, outputs=1536, rows=(1, 8, 64), weight_bytes=256 << 20, threads=2, repeats=7
    )
    torch.set_num_threads(asked.threads)
    count = max(asked.weight_bytes // (2 * asked.inputs * asked.outputs), 1)
    found = []
    with closing(_native.QuantProducts(asked.threads)) as products:
        matrices = Matrices(asked.inputs, asked.outputs, count, products)
        errors = {codes.value: matrices.error(codes) for codes in CodeFormat}
        for rows in asked.rows:
            samples = matrices.measure(rows, asked.repeats)
            flops = 2 * rows * count * asked.inputs * asked.outputs
            found += [{"rows_count": rows, **row} for row in figures(samples, matrices.nbytes, flops)]
    table(
        f"{count} matrices of {asked.outputs} x {asked.inputs}, {asked.threads} threads, "
        f"{_native.instruction_set().name.lower()}, torch {torch.__version__}, {asked.repeats} rounds",
        found, "format", "rows_count", "median_s", "weight_bytes_per_s", "flops_per_s", "speed_to_torch_ratio",
        "bandwidth_to_copy_ratio",
    )  # fmt: skip
    for codes, error in errors.items():
        OUTPUT.line(
            f"{codes}: {error['bytes_per_parameter']:.4f} bytes a weight; weights err by {error['weight_error_ratio']:.2%} "
            f"(root mean square), a product in fp32 by {error['product_error_ratio']:.1e} of the sum of its magnitudes"
        )
    finish({"products": found, "errors": errors})


if __name__ == "__main__":
    start(main)
