"""Parameters of which a few are quick, or which take turns."""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """``cases`` as parameters, all but ``quick`` marked slow."""
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def in_turns(cases: Iterable[Any], kinds: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each of ``cases`` with one of ``kinds``, which take turns."""
    return list(zip(cases, cycle(kinds), strict=False))
