"""The norm of gradients over a mesh: each gradient once, and the bits of one process however experts are spread."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launcher import Ranks

from tierstore.dense import DenseConfig, DenseSlices, unit_layouts
from tierstore.dense.parameters import DividedParameters
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.prefetch.gradients import ExpertGradients
from tierstore.stats import StallLedger
from tierstore.store.adamw import AdamWConfig
from tierstore.train.stepping import expansion, gradient_norm

_RANDOM = random.Random(7)
EXPERTS = [_RANDOM.uniform(0, 1) * 10 ** _RANDOM.uniform(-12, 6) for _ in range(12)]
UNITS = [_RANDOM.uniform(0, 1) * 10 ** _RANDOM.uniform(-3, 3) for _ in range(8)]


@dataclass
class GivenGradients:
    """``ExpertGradients`` and ``DenseSlices``, as far as a norm asks them: sums of squares that a test gives."""

    given: Sequence[float] = field(default_factory=list)

    def squares(self) -> list[float]:
        return list(self.given)


def norm(mesh: Mesh, experts: Sequence[float], units: Sequence[float]) -> float:
    """This rank's part of ``experts``, which its group divides, and of ``units``, which stages do."""
    owned = mesh.blocks(len(experts)).owned(mesh.expert.rank)
    share = len(units) // mesh.stages
    own = units[mesh.pipeline.rank * share : (mesh.pipeline.rank + 1) * share]
    part = len(owned) // mesh.stages
    mine = [experts[owned[0] + mesh.pipeline.rank * part + i] for i in range(part)]
    return gradient_norm(
        cast(ExpertGradients, GivenGradients(mine)),
        cast(DenseSlices, GivenGradients(own)),
        mesh,
        StallLedger(),
    )


def alone() -> Mesh:
    return Mesh.alone(RankEnvironment(), torch.device("cpu"))


def test_by_hand() -> None:
    assert norm(alone(), [9.0, 4.0], [1.0, 2.0]) == 4.0


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {}),
        (4, {}),
        (4, {"expert": 2}),
        (4, {"tensor": 2}),
        (4, {"stages": 2}),
        (4, {"stages": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_the_bits_of_one_process(ranks: Ranks, size: int, layout: dict[str, int]) -> None:
    """Whichever rank holds which experts and units: replicas count once, and no rounding depends on the layout."""
    one = norm(alone(), EXPERTS, UNITS)
    assert ranks.run(size, norm, EXPERTS, UNITS, **layout) == [one] * size


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_not_finite(ranks: Ranks, bad: float) -> None:
    assert math.isnan(norm(alone(), [1.0, bad], [1.0]))
    assert all(math.isnan(found) for found in ranks.run(2, norm, [1.0, bad], [1.0]))
    assert all(math.isnan(found) for found in ranks.run(2, norm, [1.0, 1.0], [bad]))


@given(st.lists(st.floats(0, 1e60), max_size=20), st.integers(0, 20))
def test_an_expansion_is_the_sum_without_rounding(values: list[float], cut: int) -> None:
    """Against one sum of everything: two ranks' parts, each sent as four doubles."""
    assert math.fsum([*expansion(values[:cut]), *expansion(values[cut:])]) == math.fsum(values)


# Dense parameters -------------------------------------------------------------------------------------------


def dense_squares(mesh: Mesh) -> list[float]:
    """Two units of a whole and a divided parameter, all of whose gradients are 1; a rank has its part of the divided one."""
    width = 24 // mesh.tensor.size
    units = [
        (name, [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(width, 2))])
        for name in ("first", "second")
    ]
    divided = None
    if mesh.tensor.size > 1:
        divided = DividedParameters(mesh.tensor, (frozenset({1}), frozenset({1})))
    options: dict[str, Any] = {"adamw": AdamWConfig(), "config": DenseConfig(), "divided": divided}
    layouts = unit_layouts(units, ranks=mesh.data.size)
    dense = DenseSlices(units, layouts, group=mesh.data, device=torch.device("cpu"), **options)
    for unit in dense.slices:
        for region, kept in unit.layout.slices():
            own = slice(mesh.data.rank * region.slice_numel, (mesh.data.rank + 1) * region.slice_numel)
            whole = torch.zeros(region.padded_numel)
            whole[: region.numel] = 1
            unit.gradient[kept].copy_(whole[own])
    return dense.squares()


@pytest.mark.parametrize(("size", "tensor"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_parts_count_each_and_whole_parameters_once(ranks: Ranks, size: int, tensor: int) -> None:
    """Of each unit 5 + 48 ones, however they are cut over data ranks and divided over tensor ranks."""
    for found in ranks.run(size, dense_squares, tensor=tensor):
        assert found == pytest.approx([53.0, 53.0])
