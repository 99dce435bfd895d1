"""The host cache's settings are checked when they are made."""

from __future__ import annotations

import math

import pytest

from tierstore.cache import CacheConfig, PolicyName, Scope
from tierstore.errors import ConfigError


@pytest.mark.parametrize("bad", [{"decay": 0.0}, {"decay": 1.5}, {"decay_every": 0}, {"threshold": -1.0}])
def test_bad_settings_name_themselves(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"cache.{next(iter(bad))}: expected"):
        CacheConfig(**bad)  # type: ignore[arg-type]


def test_half_life() -> None:
    assert CacheConfig(decay=0.5, decay_every=8).half_life_steps == 8
    assert CacheConfig(decay=0.25, decay_every=8).half_life_steps == 4
    assert CacheConfig(decay=1.0).half_life_steps == math.inf


def test_starvation_is_warned_about() -> None:
    assert CacheConfig().starvation_warning is None
    assert "threshold = 2" in str(CacheConfig(threshold=2.0).starvation_warning)
    assert CacheConfig(threshold=2.0, policy=PolicyName.LRU).starvation_warning is None


def test_shares_of_layers_belong_to_layer_scope() -> None:
    assert CacheConfig(scope=Scope.LAYER, layer_shares=(1.0, 2.5)).layer_shares == (1.0, 2.5)
    with pytest.raises(ConfigError, match=r"cache\.layer_shares: expected cache\.scope = layer"):
        CacheConfig(layer_shares=(1.0,))
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"cache\.layer_shares: expected numbers above 0"):
            CacheConfig(scope=Scope.LAYER, layer_shares=(1.0, bad))
