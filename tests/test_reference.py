"""The generated pages of the documentation are what the code says."""

import dataclasses
import enum
import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/reference"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("reference", str(SCRIPT))
    spec = importlib.util.spec_from_loader("reference", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["API.md", "COMMANDS.md", "KEYS.md"])
def test_the_reference_is_current(reference: ModuleType, name: str) -> None:
    path = reference.DOCS / name
    assert path.read_text() == reference.pages()[path], f"{path} is out of date: run scripts/reference"


def test_every_public_name_has_a_summary(reference: ModuleType) -> None:
    assert "|  |" not in reference.pages()[reference.DOCS / "API.md"]


def test_a_summary_is_neither_inherited_nor_generated(reference: ModuleType) -> None:
    class Told(enum.Enum):
        """What it is. More."""

    class Untold(enum.Enum):
        A = 1

    @dataclasses.dataclass
    class Fields:
        a: int

    assert reference.own_docstring(Told) == "What it is. More."
    assert reference.own_docstring(reference.pages) == "The text of each page."
    assert Fields.__doc__ is not None  # generated: its signature
    assert reference.own_docstring(Untold) == reference.own_docstring(Fields) == ""
