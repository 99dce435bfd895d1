"""Values of the lab: what follows from their fields."""

import math
from dataclasses import replace

import pytest
from cases import outcome

from tierstore.lab.results import Curve, TuneResult, TuneVerdict


def test_ratios_and_labels():
    one = outcome(10, 25, policy_options={"threshold": 0.0, "half_life": 8, "variant": "paper"})
    assert one.miss_ratio == 0.25
    assert one.label == "lru(half_life=8, threshold=0, variant=paper)"
    assert replace(one, requests=0, hits=0, misses=0).miss_ratio == 0.0
    assert outcome(1, 1).label == "lru"


def test_the_label_of_a_curve():
    curve = Curve((outcome(10, 50), outcome(20, 30)))
    assert (curve.policy, curve.label) == ("lru", "lru")
    tuned = Curve((outcome(10, 50, policy_options={"k": 1}), outcome(20, 30, policy_options={"k": 2})))
    assert tuned.label == "lru"


def test_regret_is_relative_to_the_best_in_hindsight():
    result = TuneResult(
        chosen=outcome(10, 11),
        baseline=outcome(10, 20),
        best=outcome(10, 10),
        gain=0.09,
        gain_low=0.05,
        gain_high=0.1,
        confidence=0.95,
        verdict=TuneVerdict.BETTER,
        tuned_steps=1,
        advice="",
        configuration="",
    )
    assert result.regret == pytest.approx(0.1)
    assert replace(result, best=outcome(10, 0)).regret == math.inf
    assert replace(result, best=outcome(10, 0), chosen=outcome(10, 0)).regret == 0.0
    assert replace(result, objective="stall").regret == 0.0
