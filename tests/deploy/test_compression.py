"""Which experts become one, and what becomes of their columns."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.deploy.compression import LayerUse, columns_of, expert_of, groups_of, merge, partners
from tierstore.deploy.records import Method
from tierstore.moe.config import Activation, ExpertShape

_USE = LayerUse(
    (0.4, 0.1, 0.3, 0.2),
    ((1.0, 0.0, 0.9, 0.0), (0.0, 1.0, 0.0, 0.8), (0.9, 0.0, 1.0, 0.0), (0.0, 0.8, 0.0, 1.0)),
)


def test_pruning_keeps_the_most_used() -> None:
    assert groups_of(_USE, 2, Method.PRUNE) == ((0,), (2,))
    assert groups_of(_USE, 3, Method.PRUNE) == ((0,), (2,), (3,))


def test_merging_joins_what_loses_least() -> None:
    """Experts 1 and 3 differ by 0.2, times 0.1; 0 and 2 by 0.1, times 0.3; all others by 1, times 0.1 at least."""
    assert groups_of(_USE, 3, Method.MERGE) == ((0,), (1, 3), (2,))
    assert groups_of(_USE, 2, Method.MERGE) == ((0, 2), (1, 3))
    assert groups_of(_USE, 1, Method.MERGE) == ((0, 1, 2, 3),)


@pytest.mark.parametrize("method", list(Method))
def test_as_many_as_there_are_stay(method: Method) -> None:
    assert groups_of(_USE, 4, method) == ((0,), (1,), (2,), (3,))


def test_of_equals_the_first() -> None:
    alike = LayerUse((0.25,) * 4, ((1.0,) * 4,) * 4)
    assert groups_of(alike, 2, Method.PRUNE) == ((0,), (1,))
    assert groups_of(alike, 3, Method.MERGE) == ((0, 1), (2,), (3,))


_SHAPES = [
    ExpertShape(4, 3),
    ExpertShape(4, 3, Activation.GELU),
    ExpertShape(4, 3, Activation.CLAMPED_SWIGLU),
]


def _expert(shape: ExpertShape, seed: int) -> torch.Tensor:
    return torch.randn(shape.numel, generator=torch.Generator().manual_seed(seed))


def test_columns_worked_by_hand() -> None:
    """D = 1, F = 2: gates (1, 2), ups (3, 4), downs (5, 6)."""
    columns, bias = columns_of(ExpertShape(1, 2), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert columns.tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert bias.numel() == 0


def test_columns_with_biases_worked_by_hand() -> None:
    """D = 1, F = 2: gate and up in turns (1, 2, 3, 4), their biases (5, 6, 7, 8), downs (9, 10), its bias 11."""
    shape = ExpertShape(1, 2, Activation.CLAMPED_SWIGLU)
    columns, bias = columns_of(shape, torch.arange(1.0, 12.0))
    assert columns.tolist() == [[1.0, 2.0, 5.0, 6.0, 9.0], [3.0, 4.0, 7.0, 8.0, 10.0]]
    assert bias.tolist() == [11.0]


@pytest.mark.parametrize("shape", _SHAPES, ids=lambda shape: shape.activation.value)
def test_an_expert_is_its_columns(shape: ExpertShape) -> None:
    flat = _expert(shape, 1)
    assert torch.equal(expert_of(shape, *columns_of(shape, flat)), flat)


@pytest.mark.parametrize("shape", _SHAPES, ids=lambda shape: shape.activation.value)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_same_columns_in_another_order_merge_to_themselves(shape: ExpertShape, seed: int) -> None:
    flat = _expert(shape, seed)
    columns, bias = columns_of(shape, flat)
    order = torch.randperm(shape.d_ff, generator=torch.Generator().manual_seed(seed))
    other = expert_of(shape, columns[order], bias)
    assert torch.allclose(merge(shape, [flat, other], [0.7, 0.3]), flat, atol=1e-6)


def test_partners_are_chosen_the_most_alike_first() -> None:
    """Both base columns point to other column 0; the second more so. The first gets what is left."""
    base = torch.tensor([[1.0, 0.5], [1.0, 0.0]])
    other = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    chosen, alike = partners(base, other)
    assert chosen.tolist() == [1, 0]
    assert alike.tolist() == pytest.approx([0.5 / 1.25**0.5, 1.0])


def test_columns_without_a_counterpart_stay_those_of_the_expert_used_most() -> None:
    """D = 1, F = 1: the columns (1, 1, 1) and (-1, -1, -1) are opposite; (2, 2, 2) is the same direction."""
    shape = ExpertShape(1, 1)
    one, opposite, twice = torch.ones(3), -torch.ones(3), 2 * torch.ones(3)
    assert merge(shape, [opposite, one], [0.1, 0.9]).tolist() == [1.0, 1.0, 1.0]
    assert merge(shape, [one, twice], [0.75, 0.25]).tolist() == [1.25, 1.25, 1.25]
