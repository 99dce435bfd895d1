"""How long a drive lasts."""

from __future__ import annotations

import math

import pytest

from tierstore.endurance import DAY_S, drive_life_s


def test_by_hand() -> None:
    """600 TB at 20 MB/s: 347 days."""
    assert drive_life_s(600e12, 20e6 * 100, 100) / DAY_S == pytest.approx(347.2, abs=0.1)
    assert drive_life_s(600e12, 0, 100) == math.inf
    assert drive_life_s(600e12, 5, 0) == math.inf
