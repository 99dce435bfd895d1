"""What an opening decides before anything is opened: budgets and the quotas of layers."""

from __future__ import annotations

import pytest

from tierstore.cache.config import CacheConfig, Scope
from tierstore.errors import BudgetError, ConfigError
from tierstore.store import RecordSchema, StoreConfig, WeightFormat
from tierstore.store.opening import check_budget, layer_quotas, minimum_host_budget

SCHEMA = RecordSchema("expert", 4096, WeightFormat.FP32)


def test_quotas_by_hand() -> None:
    assert layer_quotas([1, 3], 9) == [0, 5, 0, 4]
    assert layer_quotas([1, 3], 9, [1.0, 2.0]) == [0, 3, 0, 6]
    # 9 * 0.35 = 3.15 and 9 * 0.65 = 5.85: the frame that is left over goes to the first.
    assert layer_quotas([3, 1], 9, [0.35, 0.65]) == [0, 4, 0, 5]
    # Shares that were rounded still give back the frames that they came from.
    assert layer_quotas([0, 1, 2], 9, [0.333333333, 0.555555556, 0.111111111]) == [3, 5, 1]


def test_the_smallest_share_must_hold_a_record() -> None:
    plain = CacheConfig(scope=Scope.LAYER)
    uneven = CacheConfig(scope=Scope.LAYER, layer_shares=(3.0, 1.0))
    each = minimum_host_budget([SCHEMA])
    assert minimum_host_budget([SCHEMA], plain, 2) == 2 * each
    assert minimum_host_budget([SCHEMA], uneven, 2) == 4 * each
    check_budget(StoreConfig(host_budget=4 * each, cache=uneven), [SCHEMA], [0, 1])
    with pytest.raises(BudgetError, match=f"the minimum is {4 * each} bytes"):
        check_budget(StoreConfig(host_budget=4 * each - 1, cache=uneven), [SCHEMA], [0, 1])
    with pytest.raises(ConfigError, match="layer_shares: expected 3, one for each layer, got 2"):
        check_budget(StoreConfig(host_budget=9 * each, cache=uneven), [SCHEMA], [0, 1, 2])
