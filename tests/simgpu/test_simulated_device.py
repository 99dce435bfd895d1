"""The simulated device itself: it finds races, and none where there are none; it counts."""

import pytest
from device_cases import CASES, run_case
from launcher import Ranks


@pytest.mark.parametrize("name", CASES)
def test_case(simulated_ranks: Ranks, name: str) -> None:
    simulated_ranks.run(1, run_case, name)
