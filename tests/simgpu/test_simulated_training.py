"""tierstore trains on a device with memory of its own: the CPU's bits, every access is ordered, and the host goes on."""

from pathlib import Path

import pytest
from launcher import Ranks
from training_cases import WAYS, check_counts, train, train_holding, uploads

from tierstore.tiers.slots import SlotGradient


@pytest.mark.parametrize("way", WAYS)
def test_one_device(ranks: Ranks, simulated_ranks: Ranks, tmp_path: Path, text: Path, way: str) -> None:
    ((expected, _, _),) = ranks.run(1, train, tmp_path / "cpu", WAYS[way], str(text))
    ((found, violations, counts),) = simulated_ranks.run(1, train, tmp_path / "device", WAYS[way], str(text))
    assert not violations
    assert found == expected
    check_counts(counts, WAYS[way])


def test_gradients_in_bf16_leave_with_half_the_bytes(
    simulated_ranks: Ranks, tmp_path: Path, text: Path
) -> None:
    bits, left, copied = [], [], []
    for gradient in SlotGradient:
        ((trained, nbytes),) = simulated_ranks.run(
            1, train_holding, tmp_path / gradient.value, WAYS["bf16"], str(text), gradient
        )
        found, violations, counts = trained
        assert not violations
        bits.append(found)
        left.append(nbytes)
        copied.append(counts["d2h.bytes"])
    assert bits[0] == bits[1]
    assert left[0] == 2 * left[1] > 0
    assert copied[0] - copied[1] == left[1]  # nothing else leaves with other bytes


def test_slots_save_uploads(simulated_ranks: Ranks, tmp_path: Path, text: Path) -> None:
    """A step has a forward and a backward pass over 12 experts and updates all: 2 * 12 - S copies. No others are saved."""
    found = [
        simulated_ranks.run(1, uploads, tmp_path / f"{slots}", slots, str(text))[0] for slots in (6, 9, 12)
    ]
    assert [copied for copied, *_ in found] == [18, 15, 12]
    fewest, rest = found[-1], found[:-1]
    for copied, nbytes, expert, _ in rest:
        assert nbytes - fewest[1] == (copied - fewest[0]) * expert


def test_stepped_experts_are_copied_before_the_next_forward_pass(
    simulated_ranks: Ranks, tmp_path: Path, text: Path
) -> None:
    """With a slot for each of 12 experts, the step queues the copies that the next forward pass needs, but the last one,
    because a slot is left for the expert that is being computed. Without lookahead the forward pass queues all. If six
    gradients have spare buffers, their experts' copies are left to the forward pass: a copy would make a step urgent.
    """
    found = [
        simulated_ranks.run(1, uploads, tmp_path / f"{depth} {budget}", 12, str(text), depth, budget)[0]
        for depth, budget in ((0, 320_000), (1, 320_000), (1, 4 << 20))
    ]
    assert [(copied, later) for copied, _, _, later in found] == [(12, 12), (12, 1), (12, 6)]
