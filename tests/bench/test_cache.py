"""bench cache: every policy has its rates, and the traces are what they say. Nothing here asserts a speed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from tierstore.bench.cache import key_requests, pass_requests, run
from tierstore.cli.main import cli
from tierstore.errors import ConfigError
from tierstore.lab.simulate import known_policies


def test_every_policy_is_measured():
    heard = []
    result = run(requests=4000, keys=200, repeats=2, curve_points=3, announce=heard.append)
    assert set(result.policies) == {*known_policies(bounds=False), "belady"}
    for name, rates in result.policies.items():
        assert rates.passes.requests_per_s == 1 / rates.passes.request_s > 0
        assert (rates.keys is not None) == (name not in ("next-use", "learned-use"))
    assert result.curves.points == 3
    assert result.curves.elapsed_s > 0
    assert len(heard) == 3


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


def test_the_command():
    arguments = [
        "bench",
        "cache",
        "--requests",
        "2000",
        "--keys",
        "50",
        "--repeats",
        "1",
        "--curve-points",
        "2",
    ]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["curves"]["points"] == 2
    assert "layer passes, event-atomic" in result.stderr
    assert "curves of 2 points over 2000 requests" in result.stderr


@pytest.mark.parametrize("wrong", ["requests", "keys", "repeats"])
def test_counts_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match=f"--{wrong}: expected at least 1"):
        run(**{"requests": 1, "keys": 1, "repeats": 1, wrong: 0})
