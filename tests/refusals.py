"""What is refused: the type of the error, and what its message names (keys, options, files, values), not its sentence."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Refusal:
    """``act`` raises ``error``, whose text has each of ``named``."""

    name: str
    act: Callable[..., object]
    error: type[Exception]
    named: tuple[str, ...]


def each_of(rows: Mapping[type[Exception], Sequence[tuple[Any, ...]]]) -> pytest.MarkDecorator:
    """Runs a test with every ``refusal`` of a table: (name, act, named...) by the type of the error."""
    table = [
        Refusal(name, act, error, tuple(named))
        for error, of_error in rows.items()
        for name, act, *named in of_error
    ]
    return pytest.mark.parametrize("refusal", table, ids=lambda refusal: str(refusal.name))


@contextmanager
def refuses(
    error: type[Exception] | tuple[type[Exception], ...], *named: object
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises ``error``, whose text has each of ``named``."""
    with pytest.raises(error) as caught:
        yield caught
    assert [part for part in map(str, named) if part not in str(caught.value)] == []
