"""Which experts become one."""

from __future__ import annotations

import pytest

from tierstore.deploy.compression import LayerUse, groups_of
from tierstore.deploy.config import Method

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
