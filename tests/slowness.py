"""Parameters of which a few are quick, or not all are tried each time."""

from collections.abc import Iterable
from typing import Any

import pytest
from effort import share


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """``cases`` as parameters, all but ``quick`` marked slow."""
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def turn(kinds: Iterable[Any], number: int) -> list[Any]:
    """The one of ``kinds`` whose turn it is; in the profile `thorough` all of them."""
    kinds = list(kinds)
    return kinds if share(len(kinds)) == len(kinds) else [kinds[number % len(kinds)]]


def in_turns(cases: Iterable[Any], kinds: Iterable[Any]) -> list[Any]:
    """Each of ``cases`` with one of ``kinds``, which take turns; in the profile `thorough` with each of them."""
    return [(case, kind) for number, case in enumerate(cases) for kind in turn(kinds, number)]
