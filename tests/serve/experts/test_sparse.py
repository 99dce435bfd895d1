"""Chosen experts in device slots."""

from pathlib import Path

import numpy as np
import pytest
from slotted import make_store, open_slotted

from tierstore.errors import BudgetError
from tierstore.prefetch import PredictorName
from tierstore.serve.config import ExpertMemory

LAYERS, EXPERTS = (0, 2), 4
SPARSE = ExpertMemory.SPARSE


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sparse") / "s"
    make_store(directory, LAYERS, EXPERTS)
    return directory


def test_what_the_last_token_used_is_not_copied_again(store: Path) -> None:
    with open_slotted(
        store, LAYERS, EXPERTS, slots=3, ring=0, memory=SPARSE, predictor=PredictorName.NONE
    ) as made:
        made.begin()
        assert made.copied_by(0, 1, 3) == 2
        assert made.copied_by(2, 0) == 1  # 0.1 0.3 2.0
        made.begin()
        assert made.copied_by(0, 1, 3) == 0
        assert made.copied_by(2, 0) == 0
        made.begin()
        assert made.copied_by(0, 2) == 1, "the least recently used goes: 0.1"
        assert made.copied_by(2, 0) == 0
        assert made.copied_by(0, 1, 3) == 1
        assert (made.slots.asked, made.slots.found, made.slots.guessed) == (10, 5, 0)


def test_experts_that_are_there_come_first(store: Path) -> None:
    with open_slotted(
        store, LAYERS, EXPERTS, slots=4, ring=0, memory=SPARSE, predictor=PredictorName.NONE
    ) as made:
        made.begin()
        made.read(0, [2])
        assert made.read(0, [0, 1, 2]) == [2, 0, 1]


def test_guesses_are_copied_while_the_layer_before_computes(store: Path) -> None:
    with open_slotted(
        store, LAYERS, EXPERTS, slots=6, ring=0, memory=SPARSE, predictor=PredictorName.ROUTER, host=6
    ) as made:
        made.begin()
        assert made.experts.reach(0) == [2]
        made.experts.offer(0, 2, np.array([1, 0, 1, 0]))
        assert made.copied_by(0, 0) == 3, "and what the router of layer 2 will choose"
        assert made.copied_by(2, 0, 2) == 0
        assert (made.slots.found, made.slots.guessed) == (0, 2)
        assert (made.experts.guesses.used, made.experts.guesses.right) == (3, 2)


def test_an_access_that_does_not_fit_at_once(store: Path) -> None:
    with open_slotted(
        store, LAYERS, EXPERTS, slots=2, ring=0, memory=SPARSE, host=2, predictor=PredictorName.NONE
    ) as made:
        for _ in range(3):
            made.begin()
            for layer in LAYERS:
                assert sorted(made.read(layer, range(EXPERTS))) == [0, 1, 2, 3]


def test_a_pass_that_is_left_in_its_first_group(store: Path) -> None:
    with open_slotted(
        store, LAYERS, EXPERTS, slots=2, ring=0, memory=SPARSE, predictor=PredictorName.ALL
    ) as made:
        made.begin()
        leases = made.experts.forward(0, [0, 1, 2, 3])
        next(leases)
        made.begin()
        for _ in range(2):
            made.begin()
            for layer in LAYERS:
                assert sorted(made.read(layer, range(EXPERTS))) == [0, 1, 2, 3]


def test_one_slot(store: Path) -> None:
    with open_slotted(store, LAYERS, EXPERTS, slots=1, ring=0, memory=SPARSE) as made:
        made.begin()
        assert sorted(made.read(0, [1, 2])) == [1, 2]


def test_a_ring_of_less_than_a_layer(store: Path) -> None:
    with (
        pytest.raises(BudgetError, match=r"ring.memory = ring needs one; the minimum is 16384 bytes"),
        open_slotted(store, LAYERS, EXPERTS, slots=3, ring=0, memory=ExpertMemory.RING),
    ):
        raise AssertionError
