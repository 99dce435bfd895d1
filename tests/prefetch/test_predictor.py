"""Predictors, by hand."""

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.prefetch import PredictorName, PrefetchConfig, make_predictor
from tierstore.prefetch.predictor import HistoryPredictor


def test_all_and_none() -> None:
    every, none = (make_predictor(name, range(3)) for name in (PredictorName.ALL, PredictorName.NONE))
    for predictor in (every, none):
        predictor.observe(0, [1])
    assert every.predict(0) == [0, 1, 2]
    assert none.predict(0) == []


def test_history_by_hand() -> None:
    """decay 0.75 from one half: used .625, .719, .789..; unused .375, .281..; each layer for itself.

    Expert 0 is used, used, not: .5 .625 .71875 .5390625, still worth a read; once more not: .404, no longer.
    """
    predictor = make_predictor(PredictorName.HISTORY, range(3))
    assert predictor.predict(0) == [0, 1, 2]
    predictor.observe(0, [0, 2])
    assert predictor.predict(0) == [0, 2]
    predictor.observe(0, [0])
    assert predictor.predict(0) == [0]
    predictor.observe(0, [1])
    assert predictor.predict(0) == [0]
    predictor.observe(0, [1])
    assert predictor.predict(0) == [1]
    assert predictor.predict(1) == [0, 1, 2]


def test_no_more_guesses_than_asked_for_the_surest_first() -> None:
    assert make_predictor(PredictorName.ALL, range(2, 5), most=2).predict(0) == [2, 3]
    predictor = make_predictor(PredictorName.HISTORY, range(2, 6), most=2)
    assert predictor.predict(0) == [2, 3]
    for used in ([2, 3, 5], [3, 4, 5], [3, 5]):
        predictor.observe(0, used)
    # Expert 3 and 5: .79; 4: .40; 2: .35.
    assert predictor.predict(0) == [3, 5]
    for _ in range(2):
        predictor.observe(0, [2, 3, 4])
    # 3: .88; 4: .66; 2: .64; 5: .44.
    assert predictor.predict(0) == [3, 4]


@settings(max_examples=share(50))
@given(st.lists(st.sets(st.integers(0, 4)), max_size=30))
def test_history_is_an_exponential_average(used: list[set[int]]) -> None:
    predictor = HistoryPredictor(range(5), decay=0.6)
    frequency = [0.5] * 5
    for experts in used:
        predictor.observe(7, sorted(experts))
        frequency = [0.6 * f + 0.4 * (expert in experts) for expert, f in enumerate(frequency)]
    close = {expert for expert, f in enumerate(frequency) if abs(f - 0.5) < 1e-12}
    found = set(predictor.predict(7))
    assert found - close == {expert for expert, f in enumerate(frequency) if f >= 0.5} - close
    assert predictor.predict(7) == sorted(found)


@pytest.mark.parametrize(
    ("field", "value"), [("depth", -1), ("budget", -0.1), ("budget", 0.95), ("guesses", -1)]
)
def test_configuration_is_checked(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"prefetch.{field}"):
        PrefetchConfig(**{field: value})  # type: ignore[arg-type]


def test_router_guesses_by_hand() -> None:
    predictor = make_predictor(PredictorName.ROUTER, range(2, 6))  # of eight experts, four are here
    assert predictor.predict(1) == [2, 3, 4, 5], "nothing was offered or seen"
    predictor.offer(0, 1, np.array([9, 9, 0, 2, 0, 1, 9, 9]))
    assert predictor.predict(1) == [3, 5]
    predictor.offer(0, 1, np.array([0, 0, 0, 0, 1, 0, 0, 0]))
    assert predictor.predict(1) == [3, 4, 5], "a second micro-batch"
    predictor.offer(-1, 1, np.array([0, 0, 0, 0, 1, 0, 0, 0]))
    assert predictor.predict(1) == [4], "another layer's replaces it"
    predictor.observe(1, [2, 3])
    assert predictor.predict(1) == [2, 3], "history: .625 and .375"
    predictor.observe(1, [2])
    predictor.offer(0, 1, np.array([9, 9, 0, 0, 4, 0, 9, 9]))
    assert predictor.predict(1) == [4], "as many choices as experts here"
    predictor.offer(0, 1, np.array([0, 0, 0, 0, 1, 0, 0, 0]))
    assert predictor.predict(1) == [2, 4], "more than those: 2 at .72 is nearly certain, 3 at .47 is not"
    predictor.offer(0, 1, np.zeros(8, np.int64))
    assert predictor.predict(1) == [2, 4], "a micro-batch without tokens"
    predictor.offer(-1, 1, np.zeros(8, np.int64))
    assert predictor.predict(1) == [], "nothing can be said"


def test_the_surest_guesses_of_a_router() -> None:
    predictor = make_predictor(PredictorName.ROUTER, range(5), most=2)
    for _ in range(9):
        predictor.observe(0, [0, 3])
    predictor.offer(-1, 0, np.array([0, 1, 3, 1, 0]))
    assert predictor.predict(0) == [2, 3], (
        "2 is chosen most often; of those chosen once, 3 is the most frequent"
    )
    predictor.offer(-2, 0, np.array([0, 6, 0, 0, 0]))
    assert predictor.predict(0) == [0, 1], (
        "of what was not chosen, the most frequent, and of equal ones the first"
    )


@given(
    st.lists(st.sets(st.integers(0, 5)), max_size=6),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),  # up to 18 choices, of 6 experts
    st.integers(0, 4),
)
def test_router_guesses_are_what_was_chosen_and_what_is_nearly_certain(
    seen: list[set[int]], counts: list[int], most: int
) -> None:
    predictor = make_predictor(PredictorName.ROUTER, range(6), most=most)
    frequency = [0.5] * 6
    for experts in seen:
        predictor.observe(3, sorted(experts))
        frequency = [0.75 * old + 0.25 * (each in experts) for each, old in enumerate(frequency)]
    predictor.offer(2, 3, np.array(counts))
    likely = [each for each in range(6) if counts[each] or (sum(counts) > 6 and frequency[each] >= 0.7)]
    found = predictor.predict(3)
    assert found == sorted(found)
    assert set(found) <= set(likely)
    assert len(found) == min(len(likely), most or 6)
    if found:
        assert min(counts[each] for each in found) >= max(
            (counts[each] for each in likely if each not in found), default=0
        )
