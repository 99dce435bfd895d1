"""bench cache: every policy and bound, complete figures that agree with each other. Nothing here asserts a speed."""

import json

import numpy as np
import pytest

from tierstore import _native
from tierstore.bench import cache
from tierstore.cli.output import Output
from tierstore.errors import ConfigError


@pytest.fixture(scope="module")
def result():
    return cache.run(requests=4000, keys=400, skew=0.9, capacity=0.2, repeats=3)


def test_events_are_sets_of_the_keys():
    offsets, entries = cache.zipf_columns(1000, 50, 1.2)
    assert len(offsets) == 1000 // cache.SET + 1
    sizes = np.diff(offsets.astype(np.int64))
    assert offsets[0] == 0
    assert offsets[-1] == len(entries)
    assert sizes.min() >= 1
    assert sizes.max() <= cache.SET
    events = np.split(entries, offsets[1:-1].astype(np.int64))
    assert all(len(set(event.tolist())) == len(event) for event in events)
    assert entries.max() < 50


def test_figures_by_hand():
    row = cache._Row("lru", _native.Contract.ATOMIC, 0.5, [2.0, 1.0, 4.0])
    assert cache._figures(row, 8) == {
        "policy": "lru",
        "contract": "atomic",
        "miss_ratio": 0.5,
        "median_requests_per_s": 4.0,
        "min_requests_per_s": 2.0,
        "max_requests_per_s": 8.0,
    }


def test_every_policy_and_bound_is_measured_under_both_contracts(result):
    names = [*_native.policy_names(), *_native.bound_names()]
    measured = [(row["policy"], row["contract"]) for row in result["policies"]]
    assert measured == [(name, contract) for name in names for contract in ("sequential", "atomic")]
    ratios = {(row["policy"], row["contract"]): row["miss_ratio"] for row in result["policies"]}
    for contract in ("sequential", "atomic"):
        bounds = [ratios[name, contract] for name in ("unbounded", "belady-bypass", "belady")]
        assert bounds == sorted(bounds)
        assert all(ratios[name, contract] >= bounds[2] for name in _native.policy_names())
    for row in result["policies"]:
        assert 0 < row["min_requests_per_s"] <= row["median_requests_per_s"] <= row["max_requests_per_s"]
    assert json.loads(json.dumps(result)) == result


def test_the_table_has_a_line_for_each(result, capsys):
    cache.render(result, Output.for_option(False))
    text = capsys.readouterr().out
    assert all(name in text for name in (*_native.policy_names(), *_native.bound_names()))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"requests": 1}, "requests: expected at least 8, got 1"),
        ({"keys": 3}, "keys: expected at least 16, got 3"),
        ({"repeats": 0}, "repeats: expected at least 1, got 0"),
        ({"capacity": 0}, "capacity: expected a part"),
        ({"capacity": 1.5}, "capacity: expected a part"),
    ],
)
def test_what_cannot_be_measured_is_refused(keywords, message):
    with pytest.raises(ConfigError, match=message):
        cache.run(**keywords)
