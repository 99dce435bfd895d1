"""The generated pages of the documentation are what the code says."""

import dataclasses
import enum
import importlib.machinery
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import click
import pytest

from tierstore.cli.main import cli
from tierstore.cli.options import options_json
from tierstore.serve.config import ServeConfig
from tierstore.train.config import TrainConfig

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
    assert not re.search(r"^- `\w+`$", reference.pages()[reference.DOCS / "API.md"], re.MULTILINE)


def test_the_reference_describes_every_option_and_key(reference: ModuleType) -> None:
    """Those that several commands or tables have, once, and by name wherever they are."""
    pages = reference.pages()
    commands, keys = pages[reference.DOCS / "COMMANDS.md"], pages[reference.DOCS / "KEYS.md"]
    sections = dict(
        re.findall(r"^## `(tierstore [a-z ]*[a-z])(.*?)(?=^## |\Z)", commands, re.MULTILINE | re.DOTALL)
    )
    for context in reference.walk(click.Context(cli, info_name="tierstore")):
        names = reference.options(context)
        assert all(re.search(rf"`{name}[` ,]", sections[context.command_path]) for name in names)
        assert all(re.search(rf"^- `{name}[` ,]", commands, re.MULTILINE) for name in names)
    for config in (TrainConfig, ServeConfig):
        for key in options_json(config):
            table, _, name = str(key["name"]).rpartition(".")
            assert f"- `{name}`" in keys
            assert f"`[{table}]`" in keys or not table


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
