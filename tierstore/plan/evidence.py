"""Where a number comes from. A plan shows no figure without it."""

from __future__ import annotations

from enum import StrEnum


class Evidence(StrEnum):
    """``FORMULA`` is exact arithmetic on the configuration, ``ASSUMED`` a default that was not measured here."""

    MEASURED = "measured"
    FORMULA = "formula"
    ASSUMED = "assumed"

    def weaker(self, other: Evidence) -> Evidence:
        """What a figure made of both is worth: no more than the weaker of them."""
        order = (Evidence.FORMULA, Evidence.MEASURED, Evidence.ASSUMED)
        return max(self, other, key=order.index)
