"""Ring memory: which layers it holds, what it copies, and that its weights are right."""

from pathlib import Path

import pytest
from slotted import make_store, open_slotted

from tierstore.errors import BudgetError
from tierstore.serve.config import ExpertMemory

LAYERS, EXPERTS = (1, 2, 3, 5, 8), 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ring") / "s"
    make_store(directory, LAYERS, EXPERTS)
    return directory


def test_two_of_five_layers(store: Path) -> None:
    """The picture in ``serve/experts.py``."""
    held = []
    with open_slotted(store, LAYERS, EXPERTS, slots=6, ring=2, memory=ExpertMemory.RING) as made:
        for _ in range(2):
            made.begin()
            for layer in LAYERS:
                assert made.read(layer, [0, 2]) == [0, 2]
                held.append(list(made.ring.held))
        copies = made.slots.copies
    following = LAYERS[1:] + LAYERS + LAYERS
    assert held == [list(following[pass_ : pass_ + 2]) for pass_ in range(10)]
    assert copies == EXPERTS * (2 + 2 * len(LAYERS)), (
        "two layers at first, then one for each that has computed"
    )


@pytest.mark.parametrize("count", range(1, 6))
def test_copies_of_any_ring(store: Path, count: int) -> None:
    """A pass copies each layer once, one of all layers nothing."""
    with open_slotted(
        store, LAYERS, EXPERTS, slots=15, ring=count, memory=ExpertMemory.RING, host=7, policy="next-use"
    ) as made:
        made.begin()
        first = sum(made.copied_by(layer, 0, 1, 2) for layer in LAYERS)
        made.begin()
        second = sum(made.copied_by(layer, 1) for layer in LAYERS)
    assert first == EXPERTS * (5 if count == 5 else 5 + count)
    assert second == (0 if count == 5 else EXPERTS * 5)


def test_a_layer_that_is_passed_over(store: Path) -> None:
    with open_slotted(store, LAYERS, EXPERTS, slots=9, ring=3, memory=ExpertMemory.RING) as made:
        made.begin()
        made.read(1, [0])
        assert made.ring.held == [2, 3, 5]
        assert made.copied_by(5, 1) == 3 * EXPERTS, "8 and 1 come into the slots of 2 and 3, then 2 into 5's"
        assert made.ring.held == [8, 1, 2]
        made.begin()
        assert made.copied_by(1, 0) == EXPERTS * 1 + EXPERTS * 0 + EXPERTS * 1
        assert made.ring.held == [2, 3, 5]


def test_a_pass_that_is_left(store: Path) -> None:
    with open_slotted(store, LAYERS, EXPERTS, slots=6, ring=2, memory=ExpertMemory.RING) as made:
        made.begin()
        made.read(1, [0])
        leases = made.experts.forward(2, [0, 1, 2])
        next(leases)
        made.begin()
        assert [made.read(layer, [0, 1, 2]) for layer in LAYERS] == [[0, 1, 2]] * 5
        leases.close()  # type: ignore[attr-defined]
        made.begin()
        assert [made.read(layer, [2]) for layer in LAYERS] == [[2]] * 5


def test_more_layers_than_slots(store: Path) -> None:
    with (
        pytest.raises(
            BudgetError, match=r"ring.layers: expected 1 to 2 layers of 3 experts in 8 slots, got 3"
        ),
        open_slotted(store, LAYERS, EXPERTS, slots=8, ring=3),
    ):
        raise AssertionError
