"""The documents name what there is: every room, every command, every page; and nothing besides."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import click
import pytest

from tierstore.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[1]


def rooms(package: str) -> set[str]:
    """Packages and modules of the first level."""
    return {
        path.stem
        for path in (ROOT / package).iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    } - {"__init__"}


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the table whose first title is ``title``."""
    rows = text.split(f"| {title} |")[1].split("\n\n")[0].splitlines()[2:]
    return [row.strip("|").split("|") for row in rows]


@pytest.mark.parametrize("package", ["tierstore", "native"])
def test_the_map_of_rooms_is_the_tree(package: str) -> None:
    listed = table((ROOT / "docs/DESIGN.md").read_text(), f"in `{package}/`")
    named = [name for cells in listed for name in re.findall(r"`([^`]+)`", cells[0])]
    assert len(named) == len(set(named))
    assert set(named) == rooms(package)


def test_the_readme_lists_the_commands() -> None:
    cells = [row[0] for row in table((ROOT / "README.md").read_text(), "command")]
    named = {word for cell in cells for word in re.findall(r"`tierstore ([a-z]+(?: [a-z/]+)?)", cell)}
    there: set[str] = set()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        if isinstance(command, click.Group):
            there |= {f"{name} {inner}" for inner in command.commands}
        else:
            there.add(name)
    split = {
        f"{name.split()[0]} {inner}" for name in named if "/" in name for inner in name.split()[1].split("/")
    }
    assert {name for name in named if "/" not in name} | split == there


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"`docs/{page.name}`" in text
    for path in re.findall(r"`((?:docs|examples)/[^` *]+)`", text):
        assert (ROOT / path).exists(), path


def test_constraints_pin_what_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    asked = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *itertools.chain(*extras),
    ]
    required = {
        re.split(r"[<>=\[]", one)[0]: tuple(map(int, re.split(r"[<>=]+", one)[1].split(".")))
        for one in (line.split(";")[0] for line in asked)  # without environment markers
        if not one.startswith("tierstore")
    }
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert set(pins) == set(required)
    for name, least in required.items():
        assert tuple(map(int, pins[name].split("."))) >= least, name
