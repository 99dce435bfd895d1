"""bench cache: the traces by hand, and a tiny run. Nothing here asserts a speed."""

import numpy as np
import pytest

from tierstore.bench.cache import key_requests, pass_requests
from tierstore.lab.simulate import known_policies


def test_a_tiny_run(tiny_bench):
    found = tiny_bench("cache", "--requests=4000", "--keys=200", "--repeats=2", "--curve-points=3")
    policies = found.figures["policies"]
    assert set(policies) == {*known_policies(bounds=False), "belady"}
    for name, rates in policies.items():
        assert rates["passes_requests_per_s"] == 1 / rates["passes_request_s"] > 0
        assert ("keys_request_s" in rates) == (name not in ("next-use", "learned-use"))
    assert found.figures["curves"]["points"] == 3
    assert found.figures["curves"]["elapsed_s"] > 0
    assert "layer passes, event-atomic" in found.table


def test_the_traces():
    keys = key_requests(50_000, 100)
    counts = np.sort(np.bincount(keys.entries, minlength=100))[::-1]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.2)
    passes = pass_requests(2000)
    assert np.diff(passes.offsets).tolist() == [20] * 100
    assert passes.layers.tolist() == [event % 26 for event in range(100)]
    assert (passes.entries // 64 == np.repeat(passes.layers, 20)).all()
    assert (np.diff(passes.entries.reshape(-1, 20), axis=1) > 0).all()


def test_passes_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    whole = pass_requests(2000, seed=3).entries
    monkeypatch.setattr("tierstore.bench.cache._PASSES_AT_ONCE", 7)
    assert (pass_requests(2000, seed=3).entries == whole).all()
