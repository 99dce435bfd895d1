"""The documents name every package, every command and every page, and nothing besides; their lines are short."""

import ast
import functools
import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from tierstore.cli.main import COMMANDS, cli
from tierstore.cli.options import options_json
from tierstore.hf.families import FAMILIES
from tierstore.serve.config import ServeConfig
from tierstore.train.config import TrainConfig

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def packages(parent: str) -> set[str]:
    """Packages and modules of the first level."""
    return {
        path.stem
        for path in (ROOT / parent).iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    } - {"__init__"}


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the table whose first title is ``title``."""
    rows = text.split(f"| {title} |")[1].split("\n\n")[0].splitlines()[2:]
    return [row.strip("|").split("|") for row in rows]


@pytest.mark.parametrize("package", ["tierstore", "native"])
def test_the_map_of_packages_is_the_tree(package: str) -> None:
    listed = table((ROOT / "docs/DESIGN.md").read_text(), f"in `{package}/`")
    named = [name for cells in listed for name in re.findall(r"`([^`]+)`", cells[0])]
    assert len(named) == len(set(named))
    assert set(named) == packages(package)


def test_the_picture_of_packages_is_the_tree() -> None:
    drawn = re.findall(r">([a-z_]+)</text>", (ROOT / "docs/packages.svg").read_text())
    assert sorted(drawn) == sorted([*packages("tierstore"), *packages("native")])


def test_pictures_are_small() -> None:
    for picture in (ROOT / "docs").glob("*.svg"):
        assert picture.stat().st_size < 60_000, picture


def test_the_drawing_of_a_race(tmp_path: Path) -> None:
    times = {
        "tokens_per_s": 2.0,
        "tokens_low_per_s": 1.0,
        "tokens_high_per_s": 3.0,
        "peak_resident_bytes": 1 << 30,
        "step_read_bytes": 1 << 20,
        "step_written_bytes": 0,
    }
    ran = {"outcome": "ran", "rival": "tierstore", "title": "tierstore", "times": times}
    saved, target = tmp_path / "rivals.json", tmp_path / "rivals.svg"
    saved.write_text(json.dumps({"figures": {"rivals": [ran, {"outcome": "skipped"}]}}))
    subprocess.run([sys.executable, ROOT / "scripts/plot.py", "race", saved, target], check=True)
    for title in ("Tokens a second", "Peak resident memory, GiB", "Disk, GiB a step"):
        assert title in target.read_text()


def test_the_plot_of_a_run(tmp_path: Path) -> None:
    line = {"loss": 2.0, "val_loss": None, "hits": 3, "misses": 1, "read_bytes": 1 << 30, "written_bytes": 0}
    metrics, target = tmp_path / "run.jsonl", tmp_path / "run.svg"
    metrics.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in (1, 2)))
    subprocess.run([sys.executable, ROOT / "scripts/plot.py", "run", metrics, target], check=True)
    for title in ("Loss, nats a byte", "Hits of the host cache, %", "Disk, GiB a step"):
        assert f">{title}<" in target.read_text()


def test_the_plot_of_a_run_with_kills(tmp_path: Path) -> None:
    time = {"computing_s": 1.0, "run_queue_s": 0.5, "threads_s": 0.5}
    line = {
        "loss": 2.0,
        "step_s": 2.0,
        "step_time": {**time, "stalls": [{"cause": "optimizer", "stall_s": 0.1}]},
    }
    lines = [{"step": step, "val_loss": 2.5 if step == 2 else None, **line} for step in (1, 2)]
    (tmp_path / "whole.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    report = {"step_tokens": 64, "resident": [[0, 1 << 30], [60, 2 << 30]], "kills_s": [30]}
    report["summary"] = {"memory": {"announced_bytes": 3 << 30}}
    for name in ("whole", "killed"):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    target = tmp_path / "killed.svg"
    subprocess.run([sys.executable, ROOT / "scripts/plot.py", "killed", tmp_path, target], check=True)
    for title in ("Loss, nats a byte", "Tokens a second", "Memory with kills, GiB", "SIGKILL", "announced"):
        assert f">{title}<" in target.read_text()


def test_the_plot_of_a_fine_tuning_run(tmp_path: Path) -> None:
    reference, metrics, target = (tmp_path / name for name in ("reference.json", "run.jsonl", "run.svg"))
    reference.write_text(json.dumps({"losses": [3.0, 2.5], "held_out": [[0, 3.1], [2, 2.4]]}))
    lines = [{"step": 1, "loss": 3.0, "val_loss": None}, {"step": 2, "loss": 2.501, "val_loss": 2.4}]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, ROOT / "scripts/plot.py", "finetune", reference, metrics, target]
    subprocess.run(command, check=True)
    for title in ("Loss, nats a token", "Difference, nats"):
        assert f">{title}<" in target.read_text()


def test_every_command_is_listed() -> None:
    cells = [row[0] for row in table((ROOT / "docs/COMMANDS.md").read_text(), "command")]
    named = {word for cell in cells for word in re.findall(r"`tierstore ([a-z]+(?: [a-z/]+)?)", cell)}
    there: set[str] = set()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        if isinstance(command, click.Group):
            there |= {f"{name} {inner}" for inner in command.list_commands(click.Context(command))}
        else:
            there.add(name)
    split = {
        f"{name.split()[0]} {inner}" for name in named if "/" in name for inner in name.split()[1].split("/")
    }
    assert {name for name in named if "/" not in name} | split == there


def test_every_experiment_has_a_row() -> None:
    text = (ROOT / "docs/BENCH.md").read_text()
    listed = " ".join(cells[0] for cells in table(text, "script"))
    scripts = {path.name for path in (ROOT / "experiments").glob("*.py")} - {"emulation.py"}
    assert set(re.findall(r"`(\w+\.py)`", listed)) == scripts


def test_every_model_family_is_named() -> None:
    (named,) = re.findall(r"Tested\s+families: (.+?)\.\s", (ROOT / "docs/FINETUNE.md").read_text(), re.DOTALL)
    words = re.split(r",\s+|\s+and\s+", named)
    assert sorted(re.sub("[-_]", "", name) for name in FAMILIES) == sorted(
        word.lower().replace("-", "") for word in words
    )


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f"]({page.relative_to(ROOT)})" in text


def test_the_readme_gives_the_two_commands() -> None:
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "pip install -c constraints.txt . && tierstore train\n" in blocks
    assert 'pip install -c constraints.txt ".[test]" && pytest\n' in blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:docs|examples|scripts|native|tierstore|tests)/[^` *<{]+)`", text):
        if "NAME" not in path:
            assert (ROOT / path.split("::")[0]).exists(), path


#: Packages whose names are also those of variables in prose: ``config.store``, ``model.eval``.
ALSO_VARIABLES = {"config", "model"}
FILE_SUFFIXES = {"py", "json", "new"}


@functools.cache
def identifiers(module: Path) -> set[str]:
    """Every name that the code of ``module`` defines, imports or uses."""
    nodes = list(ast.walk(ast.parse(module.read_text())))
    return {
        value
        for node in nodes
        for field in ("name", "asname", "id", "attr", "arg")
        if isinstance(value := getattr(node, field, None), str)
    }


@functools.cache
def configuration_keys() -> list[str]:
    return [str(key["name"]) for config in (TrainConfig, ServeConfig) for key in options_json(config)]


def is_key(name: str) -> bool:
    """Whether ``name`` is a configuration key, a table of keys, or one of a policy's options."""
    return any(
        f"{key}.".startswith(f"{name}.") or (key.endswith("options") and name.startswith(f"{key}."))
        for key in configuration_keys()
    )


def leads_somewhere(name: str) -> bool:
    """Whether the dotted ``name`` is a module below ``tierstore``, or a module and names in it."""
    parts = name.removeprefix("tierstore.").split(".")
    for count in range(len(parts), -1, -1):
        path = (ROOT / "tierstore").joinpath(*parts[:count])
        for module in (path.with_suffix(".py"), path.with_suffix(".pyi"), path / "__init__.py"):
            if module.exists():
                return set(parts[count:]) <= identifiers(module)
    return False


def dead_names(text: str, quote: str) -> list[str]:
    """The quoted dotted names in ``text`` that begin like a module, but are neither one nor a configuration key."""
    modules = packages("tierstore") - ALSO_VARIABLES | {"tierstore"}
    named = re.findall(rf"{quote}((?:tierstore\.)?[a-z_]+(?:\.\w+)+)(?:\(\))?{quote}", text)
    return [
        name
        for name in named
        if name.partition(".")[0] in modules
        and name.rpartition(".")[2] not in FILE_SUFFIXES
        and not is_key(name)
        and not leads_somewhere(name)
    ]


def test_a_name_that_leads_nowhere_is_dead() -> None:
    text = "`tierstore.store.core.StoreCore.wait()`, `store.core`, `cache.options.half_life`, `links.copy`, `tierstore.json`"
    assert dead_names(text, "`") == []
    text = "`tierstore.store.cor`, `store.core.StoreCorps`, `store.space`, `plan.pipemoe`, `cache.polic`, `config.store`"
    assert dead_names(text, "`") == re.findall("`(.+?)`", text)[:-1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_documents_name_are_there(page: Path) -> None:
    if page.name != "CHANGELOG.md":  # which names those of its time
        assert dead_names(page.read_text(), "`") == []


@pytest.mark.parametrize("directory", ["tierstore", "tests", "experiments", "examples", "rivals", "scripts"])
def test_modules_that_docstrings_name_are_there(directory: str) -> None:
    """And comments: only they quote by two accents."""
    dead = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / directory).rglob("*.py"))
        if path.name != Path(__file__).name and (names := dead_names(path.read_text(), "``"))
    }
    assert dead == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short(page: Path) -> None:
    """Except for tables and code, which do not wrap."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for line in prose.splitlines():
        assert len(line) <= 100 or line.startswith(("|", "    ")), line


def test_helper_modules_of_tests_have_names_of_their_own() -> None:
    """Tests import them by bare names from pytest's ``pythonpath``."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    names = [
        path.stem
        for directory in options["pythonpath"]
        for path in (ROOT / directory).glob("*.py")
        if path.stem != "conftest" and not path.stem.startswith("test_")
    ]
    assert len(names) == len(set(names))
    assert not set(names) & sys.stdlib_module_names
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"sys\.path\.insert", path.read_text()), path


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
        for one in (requirement.split(";")[0].split(",")[0] for requirement in asked)
        if not one.startswith("tierstore")
    }
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert set(pins) == set(required)
    for name, least in required.items():
        assert tuple(map(int, pins[name].split("."))) >= least, name
