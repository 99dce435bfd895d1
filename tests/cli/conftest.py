"""Every object that a command prints here is checked: each number says its unit in its key."""

from collections.abc import Mapping

import pytest
from key_units import violations

from tierstore.cli.output import Output


@pytest.fixture(autouse=True)
def _numbers_say_their_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = Output.emit

    def checked(output: Output, result: Mapping[str, object]) -> None:
        assert list(violations(result)) == []
        emit(output, result)

    monkeypatch.setattr(Output, "emit", checked)
