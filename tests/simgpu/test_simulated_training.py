"""tierstore trains on a device with memory of its own: the CPU's bits, and every access is ordered."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import Ranks
from training_cases import WAYS, train


@pytest.mark.parametrize("way", WAYS)
def test_one_device(ranks: Ranks, simulated_ranks: Ranks, tmp_path: Path, text: Path, way: str) -> None:
    ((expected, _, _),) = ranks.run(1, train, tmp_path / "cpu", WAYS[way], str(text))
    ((found, violations, counts),) = simulated_ranks.run(1, train, tmp_path / "device", WAYS[way], str(text))
    assert not violations
    assert found == expected
    assert counts["h2d.async"] > 0
