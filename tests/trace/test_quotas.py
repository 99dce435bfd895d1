"""Parts of a capacity, by hand."""

from __future__ import annotations

from tierstore.trace.quotas import quotas_by_layer


def test_quotas_by_hand() -> None:
    assert quotas_by_layer([1, 3], 9) == [0, 5, 0, 4]
    assert quotas_by_layer([1, 3], 9, [1.0, 2.0]) == [0, 3, 0, 6]
    # 9 * 0.35 = 3.15 and 9 * 0.65 = 5.85: the frame that is left over goes to the first.
    assert quotas_by_layer([3, 1], 9, [0.35, 0.65]) == [0, 4, 0, 5]
    # Shares that were rounded still give back the frames that they came from.
    assert quotas_by_layer([0, 1, 2], 9, [0.333333333, 0.555555556, 0.111111111]) == [3, 5, 1]


def test_quotas_are_never_more_than_the_capacity() -> None:
    # Every part lies a hundredth of a frame below a whole one.
    for shares in ([], [1.0] * 128):
        quotas = quotas_by_layer(range(128), 128 * 10**5 - 1, shares)
        assert (min(quotas), max(quotas), sum(quotas)) == (10**5 - 1, 10**5, 128 * 10**5 - 1)
