"""The host cache's settings are checked when they are made."""

import math
import re
from pathlib import Path

import pytest

from tierstore._native import policy_names
from tierstore.cache import CacheConfig, Scope
from tierstore.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "mru"}, "cache.policy: unknown cache policy 'mru'; there are: "),
        ({"options": {"beta": 0.0}}, "cache.policy: .*'lfu-decay', option 'beta': expected"),
        ({"options": {"decay": 0.5}}, "has no option 'decay'; it has: beta, half_life, interval"),
        ({"policy": "arc", "options": {"p": 1.0}}, "'arc' has no option 'p'; it has: none"),
        ({"policy": "s3-fifo", "options": {"move_threshold": 0}}, "a whole number from 1 to 255"),
        ({"policy": "no.such.module:Policy"}, "cache.policy: .*no.such.module:Policy.*No module named"),
        ({"policy": "tierstore.cache:Nothing"}, "cache.policy: .*no attribute 'Nothing'"),
        ({"policy": "tierstore.cache:CacheConfig"}, "has no method 'insert'"),
        ({"write_back_every": -1}, "cache.write_back_every"),
        ({"device_policy": "mru"}, "cache.device_policy: unknown cache policy 'mru'; there are: "),
        (
            {"device_policy": "arc", "device_options": {"p": 1.0}},
            "cache.device_policy: cache policy 'arc' has no option 'p'; it has: none",
        ),
        ({"device_options": {"half_life": 4.0}}, "cache.device_options: expected cache.device_policy"),
    ],
)
def test_bad_settings_name_themselves(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_can_be_had_by_name(policy: str) -> None:
    assert CacheConfig(policy=policy).summary.startswith(policy)


def test_the_documentation_names_every_policy_and_its_options() -> None:
    text = (Path(__file__).parents[2] / "docs" / "CACHE.md").read_text()
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    assert [name.strip(" `") for name, _, _ in rows] == policy_names()
    for name, _, described in rows:
        settings = dict(re.findall(r"`(\w+)` = ([\w.]+)", described))
        settings.pop("half_life" if "beta" in settings else "", None)  # beta and half_life are one thing
        options = {key: float(value) if value[0].isdigit() else value for key, value in settings.items()}
        CacheConfig(policy=name.strip(" `"), options=options)


def test_half_life() -> None:
    assert CacheConfig().half_life == 8
    assert CacheConfig(options={"beta": 0.25, "interval": 8}).half_life == 4
    assert CacheConfig(options={"half_life": 3}).half_life == pytest.approx(3)
    assert CacheConfig(options={"beta": 1}).half_life == math.inf
    assert CacheConfig(policy="lru").half_life is None


def test_the_summary_says_what_counts() -> None:
    assert CacheConfig().summary == "lfu-decay (corrected), threshold 0, half-life 8 steps"
    paper = CacheConfig(options={"variant": "paper", "half_life": 5})
    assert paper.summary == "lfu-decay (paper), threshold 0, half-life 5 requests"
    assert CacheConfig(policy="slru", options={"segments": 2}).summary == "slru, segments 2"


def test_starvation_is_warned_about() -> None:
    assert CacheConfig().starvation_warning is None
    warned = CacheConfig(options={"threshold": 2.0}).starvation_warning
    assert "cache.options.threshold = 2" in str(warned)
    assert CacheConfig(options={"threshold": 2.0, "beta": 1}).starvation_warning is None
    assert CacheConfig(policy="lru").starvation_warning is None


def test_shares_of_layers_belong_to_layer_scope() -> None:
    assert CacheConfig(scope=Scope.LAYER, layer_shares=(1.0, 2.5)).layer_shares == (1.0, 2.5)
    with pytest.raises(ConfigError, match=r"cache\.layer_shares: expected cache\.scope = layer"):
        CacheConfig(layer_shares=(1.0,))
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"cache\.layer_shares: expected numbers above 0"):
            CacheConfig(scope=Scope.LAYER, layer_shares=(1.0, bad))
