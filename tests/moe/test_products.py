"""Products of several experts in one call: every bit is that of ``torch.mm``."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tierstore import _native
from tierstore.moe.products import (
    count_chosen,
    fade_towards,
    multiplies_at_once,
    multiply_at_once,
    slow_products,
)

TYPES = (torch.float32, torch.bfloat16)
TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
FLAGS = Path("/proc/cpuinfo").read_text().split()
#: Where torch multiplies bf16 by the instruction that tierstore's kernel has (with AMX it has another).
OFFERED = (
    "avx512_bf16" in FLAGS
    and "amx_bf16" not in FLAGS
    and os.environ.get("TIERSTORE_ISA", "avx512") == "avx512"
)


def test_bf16_is_slow_without_avx512() -> None:
    cpu, fast = torch.device("cpu"), {"avx512bw", "avx512dq", "avx512vl"} <= set(FLAGS)
    assert (slow_products(torch.bfloat16, cpu) is None) is fast
    assert slow_products(torch.float32, cpu) is None
    assert slow_products(torch.bfloat16, torch.device("cuda")) is None


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul_(0.3).to(dtype)


def _bits(matrix: Tensor) -> Tensor:
    """They tell zeros of either sign, and those that are not numbers, apart."""
    return matrix.view(torch.int16 if matrix.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("n", "k"), [(64, 32), (96, 160), (33, 7), (1, 1)])
def test_products_at_once_have_the_bits_of_mm(dtype: torch.dtype, n: int, k: int) -> None:
    assert multiplies_at_once(torch.empty(1, dtype=dtype))
    rows = [1, 3, 0, 17, 2]
    x, out = _random(40, k, dtype=dtype, seed=1), torch.full((50, n), -1.0, dtype=dtype)
    x_first, out_first = [5, 0, 3, 22, 39 - 2], [0, 1, 4, 10, 30]
    weights = [_random(n, k, dtype=dtype, seed=10 + i) for i in range(len(rows))]
    multiply_at_once(out, out_first, x, x_first, rows, [w.data_ptr() for w in weights])
    expected = torch.full((50, n), -1.0, dtype=dtype)
    for w, o, f, r in zip(weights, out_first, x_first, rows, strict=True):
        torch.mm(x[f : f + r], w.t(), out=expected[o : o + r])
    assert torch.equal(out, expected)


def test_products_outside_of_their_matrices_are_refused() -> None:
    x, out, w = torch.ones(4, 8), torch.ones(4, 8), torch.ones(8, 8)
    for out_first, x_first, rows in (([3], [0], [2]), ([0], [4], [1]), ([5], [0], [0]), ([0], [0], [5])):
        with pytest.raises(ValueError, match="expected rows below 4"):
            multiply_at_once(out, out_first, x, x_first, rows, [w.data_ptr()])
    with pytest.raises(ValueError, match="a first row for each product"):
        multiply_at_once(out, [0, 1], x, [0], [1], [w.data_ptr()])
    with pytest.raises(ValueError, match="weights: expected one for each product"):
        multiply_at_once(out, [0], x, [0], [1], [])
    assert torch.equal(out, torch.ones(4, 8))


def test_a_library_that_is_not_there_offers_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"/nowhere/libtorch_cpu\.so is not loaded"):
        _native.TorchProducts("/nowhere/libtorch_cpu.so")


def test_other_types_are_multiplied_one_by_one() -> None:
    assert not multiplies_at_once(torch.empty(1, dtype=torch.float64))
    assert not multiplies_at_once(torch.empty(1, device="meta"))


# Few rows in bf16 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("magnitudes", [1, 30])
@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    blocks=st.integers(1, 40),
    steps=st.integers(1, 40),
    seed=st.integers(0, 2**20),
)
def test_few_rows_have_the_bits_of_mm(
    magnitudes: int, rows: list[int], blocks: int, steps: int, seed: int
) -> None:
    """Also where sums are rounded often, are too small or too large, and cancel."""
    n, k, total = 16 * blocks, 32 * steps, sum(rows)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        exponents = torch.randint(-magnitudes, magnitudes + 1, shape, generator=generator)
        return (torch.randn(*shape, generator=generator) * 2.0**exponents).bfloat16()

    x, out = draw(total, k), torch.empty(total, n, dtype=torch.bfloat16)
    weights = [draw(n, k) for _ in rows]
    firsts = [sum(rows[:i]) for i in range(len(rows))]
    multiply_at_once(out, firsts, x, firsts, rows, [w.data_ptr() for w in weights])
    for w, first, count in zip(weights, firsts, rows, strict=True):
        expected = torch.mm(x[first : first + count], w.t())
        assert torch.equal(_bits(out[first : first + count]), _bits(expected))


@pytest.mark.parametrize(("rows", "k"), [(1, 1024), (1, 4096), (3, 2048), (8, 4096), (32, 1536)])
def test_the_run_that_is_found_is_torchs(rows: int, k: int, threads: int) -> None:
    """By hand: 2^60 takes up the ones that are added to it, until -2^60 comes. If that begins the second run, the rest of
    both runs is lost in one or the other, and the ones of later runs remain. (Of narrow matrices torch may divide the
    columns among threads: those it keeps.)
    """
    run = _native.TorchProducts(str(TORCH)).run(rows, 1024, k)
    # None is found where torch has another kernel all the same: another version, or a library told to.
    assert OFFERED or run == 0
    if run:
        assert k > run
        w = torch.ones(1024, k)
        w[:, 0], w[:, run] = 2.0**60, -(2.0**60)
        got = torch.mm(torch.ones(rows, k, dtype=torch.bfloat16), w.bfloat16().t())
        assert torch.equal(got.float(), torch.full((rows, 1024), float(max(k - 2 * run, 0))))


@pytest.mark.parametrize(
    ("rows", "n", "k"), [(0, 64, 64), (33, 64, 64), (1, 8, 64), (1, 64, 48), (1, 0, 64), (1, 64, 0)]
)
def test_other_shapes_are_torchs(rows: int, n: int, k: int) -> None:
    assert _native.TorchProducts(str(TORCH)).run(rows, n, k) == 0


def test_an_instruction_set_that_is_not_to_be_used_is_not() -> None:
    code = "import sys, torch; from tierstore import _native; print(_native.TorchProducts(sys.argv[1]).run(2, 1024, 1024))"
    isa = os.environ | {"TIERSTORE_ISA": "scalar"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(TORCH)], env=isa, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"


# Guesses ----------------------------------------------------------------------------------------------------


def test_the_largest_products_are_counted_by_hand() -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 2.0]])
    x = torch.tensor([[[2.0, 1.0]], [[0.0, 3.0]]])  # scores 2 1 2 0 and 0 3 0 6
    assert count_chosen(x, None, weight, 1).tolist() == [1, 0, 0, 1], "of equal ones the first"
    assert count_chosen(x, None, weight, 2).tolist() == [1, 1, 1, 1]
    assert count_chosen(x, None, weight, 9).tolist() == [2, 2, 2, 2]
    assert count_chosen(x, None, weight, 0).tolist() == [0, 0, 0, 0]
    added = torch.tensor([[[0.0, 9.0]], [[5.0, -3.0]]])  # 2 10 2 18 and 5 0 5 -5
    assert count_chosen(x, added, weight, 2).tolist() == [1, 1, 1, 1]
    assert count_chosen(x, added, weight, 1).tolist() == [1, 0, 0, 1]
    assert count_chosen(x[:0], None, weight, 2).tolist() == [0, 0, 0, 0]
    lost = torch.full((1, 1, 2), float("nan"))
    assert count_chosen(lost, None, weight, 2).sum() == 2


@pytest.mark.parametrize("dtype", TYPES)
@given(
    rows=st.integers(1, 40),
    experts=st.integers(1, 70),
    width=st.integers(1, 70),
    top_k=st.integers(1, 9),
    expects=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_what_is_counted_is_what_torch_chooses(
    dtype: torch.dtype, rows: int, experts: int, width: int, top_k: int, expects: bool, seed: int
) -> None:
    x, weight = (_random(n, width, dtype=dtype, seed=seed + i) for i, n in enumerate((rows, experts)))
    added = _random(rows, width, dtype=dtype, seed=seed + 2) if expects else None
    found = count_chosen(x, added, weight, top_k)
    expected = x if added is None else (x.float() + added.float()).to(dtype)
    scores = torch.mm(expected, weight.t()).float()
    kept = min(top_k, experts)
    assert found.sum() == rows * kept
    least = scores.topk(kept, dim=1).values[:, -1:]
    # Scores of one type are often equal, and so are sums that one of two roundings makes.
    slack = 0.02 if dtype == torch.bfloat16 else 0.0
    assert (found >= (scores > least + slack).sum(dim=0)).all()
    assert (found <= (scores >= least - slack).sum(dim=0)).all()


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_averages_fade_towards_what_was_added(dtype: torch.dtype) -> None:
    mean, now, before = (_random(3, 1, 50, dtype=dtype, seed=seed) for seed in range(3))
    expected = 0.75 * mean.double() + 0.25 * (now.double() - before.double())
    strided = mean.repeat_interleave(2, dim=2)[:, :, ::2]
    for each in (mean, strided):
        fade_towards(each, now, before, 0.75)
        tolerance = 0.01 if dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(each.double(), expected, rtol=tolerance, atol=tolerance)


def test_averages_of_another_shape_are_refused() -> None:
    mean = torch.zeros(2, 1, 4)
    with pytest.raises(RuntimeError, match="size"):
        fade_towards(mean, torch.ones(3, 1, 4), torch.ones(3, 1, 4), 0.5)
    assert not mean.any()
