"""tierstore trains on a device with memory of its own: the CPU's bits, every access is ordered, and the host goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import Ranks
from training_cases import WAYS, check_counts, train


@pytest.mark.parametrize("way", WAYS)
def test_one_device(ranks: Ranks, simulated_ranks: Ranks, tmp_path: Path, text: Path, way: str) -> None:
    ((expected, _, _),) = ranks.run(1, train, tmp_path / "cpu", WAYS[way], str(text))
    ((found, violations, counts),) = simulated_ranks.run(1, train, tmp_path / "device", WAYS[way], str(text))
    assert not violations
    assert found == expected
    check_counts(counts, WAYS[way])
