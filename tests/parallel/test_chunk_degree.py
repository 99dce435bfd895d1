"""The best number of chunks: by hand, against all numbers of chunks, and what a backward pass sends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.parallel.chunk_degree import (
    ChunkCosts,
    Degree,
    Inputs,
    LayerPass,
    Share,
    WeightGradients,
    backward_pass,
    best_degree,
    chosen_degrees,
    forward_pass,
    pass_seconds,
    worthwhile_degree,
)

COSTS = ChunkCosts(alpha_a=1.0, beta_a=0.1, alpha_e=2.0, beta_e=0.5)
TIMES = st.floats(0, 10) | st.just(0.0)
SHARES = st.builds(Share, st.integers(1, 3), st.floats(0, 100))


def test_times_by_hand() -> None:
    """100 bytes each way (10 s and a start of 1 s), 60 of work (30 s and 2 s a chunk).

    r = 1: 11 + 32 + 11. r = 2: 6 + 34 + 6 beats the network's 24. r = 3: 2 + 20/3 + 36. r = 4: 2 + 5 + 38.
    """
    work = forward_pass(100.0, 60.0)
    expected = {1: 54.0, 2: 46.0, 3: 2 + 20 / 3 + 36, 4: 45.0}
    for r, seconds in expected.items():
        assert pass_seconds(COSTS, work, r) == pytest.approx(seconds)
    assert best_degree(COSTS, work, most=8) == Degree(3, pass_seconds(COSTS, work, 3), 3)


def test_cap() -> None:
    found = best_degree(COSTS, forward_pass(100.0, 60.0), most=2)
    assert (found.degree, found.wanted) == (2, 3)
    assert best_degree(COSTS, forward_pass(100.0, 60.0), most=3).wanted == 3


def test_equal_times_give_fewer_chunks() -> None:
    """A free start: from r = 2 on the network's 20 s are all that counts."""
    costs = ChunkCosts(alpha_a=0.0, beta_a=0.1, alpha_e=0.0, beta_e=0.5)
    assert best_degree(costs, forward_pass(100.0, 20.0), most=100) == Degree(2, 20.0, 2)
    nothing = ChunkCosts(0.0, 0.0, 0.0, 0.0)
    assert best_degree(nothing, forward_pass(100.0, 20.0), most=100).degree == 1


def test_unequal_directions() -> None:
    """d = 2, e = 1.5, c = 1 a chunk of two: the last chunk's way decides, 2 * 2 + 1.5 + 1."""
    costs = ChunkCosts(0.0, 1.0, 0.0, 1.0)
    work = LayerPass(Share(1, 4.0), Share(1, 3.0), Share(1, 2.0))
    assert pass_seconds(costs, work, 2) == pytest.approx(6.5)


def test_backward_messages() -> None:
    saved = backward_pass(100.0, 60.0, weights_bytes=4.0)
    assert (saved.dispatch, saved.combine) == (Share(2, 104.0), Share(2, 104.0))
    assert saved.experts == Share(2, 120.0)
    again = backward_pass(100.0, 60.0, weights_bytes=4.0, inputs=Inputs.SENT_AGAIN, again=40.0)
    assert (again.dispatch, again.combine) == (Share(3, 204.0), Share(2, 104.0))
    assert again.experts == Share(3, 160.0)
    outputs = backward_pass(
        100.0, 60.0, inputs=Inputs.SENT_AGAIN, gradients=WeightGradients.AT_TOKENS, again=60.0
    )
    assert (outputs.dispatch, outputs.combine) == (Share(2, 200.0), Share(2, 200.0))
    kept = backward_pass(100.0, 60.0, gradients=WeightGradients.AT_TOKENS)
    assert (kept.dispatch, kept.combine) == (Share(1, 100.0), Share(1, 100.0))


@given(
    st.builds(ChunkCosts, TIMES, TIMES, TIMES, TIMES),
    st.builds(LayerPass, SHARES, SHARES, SHARES),
    st.integers(1, 200),
)
def test_best_of_all(costs: ChunkCosts, work: LayerPass, most: int) -> None:
    times = [pass_seconds(costs, work, r) for r in range(1, most + 1)]
    found = best_degree(costs, work, most=most)
    assert found.seconds == pass_seconds(costs, work, found.degree)
    assert found.seconds <= min(times) * (1 + 1e-9)
    assert all(spent > found.seconds for spent in times[: found.degree - 1])
    assert found.wanted >= found.degree
    assert pass_seconds(costs, work, found.wanted) <= found.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["alpha_a", "beta_a", "alpha_e", "beta_e"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_costs(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        ChunkCosts(**({"alpha_a": 1.0, "beta_a": 1.0, "alpha_e": 1.0, "beta_e": 1.0} | {name: value}))


def test_bad_arguments() -> None:
    work = forward_pass(1.0, 1.0)
    with pytest.raises(ValueError, match="most"):
        best_degree(COSTS, work, most=0)
    with pytest.raises(ValueError, match="degree"):
        pass_seconds(COSTS, work, 0)
    with pytest.raises(ValueError, match="amount"):
        Share(1, -1.0)


def test_parts_of_experts_by_hand() -> None:
    """The passes above: 54 s in one chunk, 46 in two, 44.7 in three and 45 in four. A rank with one expert takes three for
    both; with two experts two and four are its whole parts, and four saves 2.2%; with three it keeps experts whole.
    """
    passes = [(COSTS, forward_pass(100.0, 60.0))] * 2
    for owned, degree in ((1, 3), (2, 4), (3, 3)):
        found = chosen_degrees(passes, present=(1, 1), owned=owned, most=8)
        assert [one.degree for one in found] == [degree] * 2
        assert [one.seconds for one in found] == [pass_seconds(COSTS, passes[0][1], degree)] * 2
    slightly = chosen_degrees(passes, present=(2, 2), owned=2, most=2)
    assert [(one.degree, one.wanted) for one in slightly] == [(2, 3)] * 2


@given(st.lists(st.tuples(SHARES, SHARES, SHARES), min_size=1, max_size=2), st.integers(1, 6))
def test_one_number_for_all_passes_where_experts_are_divided(
    shares: list[tuple[Share, Share, Share]], owned: int
) -> None:
    """Against all numbers; and with whole experts alone, each pass as if it were the only one."""
    passes = [(COSTS, LayerPass(*each)) for each in shares]
    present = [1] * len(passes)
    alone = [worthwhile_degree(*one, present=1, most=owned) for one in passes]
    assert chosen_degrees(passes, present=present, owned=owned, most=owned) == alone
    found = chosen_degrees(passes, present=present, owned=owned, most=8 * owned)
    seconds = sum(one.seconds for one in found)
    if found != alone:
        assert len({one.degree for one in found}) == 1
        assert found[0].degree % owned == 0
        assert seconds < sum(one.seconds for one in alone)
    for parts in range(1, 9):
        assert seconds <= sum(pass_seconds(*one, parts * owned) for one in passes) * 1.021
