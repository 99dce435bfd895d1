"""Shared options, and how they become overrides."""

import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tierstore.cli.options import (
    FRACTION,
    SIZE,
    Defaults,
    config_options,
    config_overrides,
    dataclass_options,
    help_config_option,
    json_option,
    set_option,
)
from tierstore.cli.output import Output, OutputMode
from tierstore.config import dotted_fields, load, option
from tierstore.errors import ConfigError
from tierstore.train.config import TrainConfig

pytestmark = pytest.mark.usefixtures("forked_python")


class Device(Enum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, kw_only=True)
class Host:
    budget: int = field(default=2**28, metadata={"size": True, "help": "what experts may use"})


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 80
    device: Device = Device.CPU
    data: tuple[str, ...] = ()
    note: str | None = None
    host: Host = Host()


@click.command()
@click.option("--budget", type=SIZE)
@click.option("--share", type=FRACTION)
@click.option("--steps", type=int)
@help_config_option(Config)
@set_option()
@json_option
def command(
    budget: int | None, share: str | None, steps: int | None, settings: tuple[str, ...], output: Output
) -> None:
    config = load(Config, None, config_overrides(settings, {"host.budget": budget, "steps": steps}))
    click.echo(f"{config.steps} {config.host.budget} {share} {output.mode is OutputMode.JSON}")


@pytest.mark.parametrize(
    ("command", "option"), [("generate", "--prompt"), ("generate", "--stop"), ("serve", "--name")]
)
def test_bytes_that_are_not_text_are_refused(tmp_path: Path, command: str, option: str) -> None:
    """Of a process: its arguments are bytes."""
    arguments = [sys.executable, "-m", "tierstore.cli.main", command, tmp_path, option, b"abc \xff"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tierstore: error: {option}: expected text in UTF-8, got 'abc ")
    assert done.stderr.count("\n") == 1


def run(*args: str) -> Result:
    return CliRunner().invoke(command, list(args))


def test_options_and_settings_meet_in_one_configuration() -> None:
    assert run().stdout == f"80 {2**28} None False\n"
    assert run("--budget", "1KiB", "--share", "25%", "--json").stdout == "80 1024 25% True\n"
    assert run("--set", "steps=3", "--set", "host.budget = 2KiB").stdout == "3 2048 None False\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--budget", "lots"], "--budget: expected a size such as 512MiB"),
        (["--budget", "25%"], "--budget: expected a size such as 512MiB"),
        (["--share", "125%"], "--share: expected a size such as 512MiB, 4GB, 25% or 0.25"),
    ],
)
def test_a_bad_size_names_its_option(args: list[str], said: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        (("steps",), {}, "--set: expected KEY=VALUE, got 'steps'"),
        (("=3",), {}, "--set: expected KEY=VALUE"),
        (("steps=3", "steps=4"), {}, "--set steps: set more than once"),
        (("steps=3",), {"steps": 3}, "--set steps: set more than once"),
    ],
)
def test_bad_settings(settings: tuple[str, ...], options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_overrides(settings, options)


def test_a_value_may_hold_an_equals_sign() -> None:
    assert config_overrides(("note=a=b",), {"steps": None}) == {"note": "a=b"}


def test_blanks_are_the_value_of_text() -> None:
    """``KEY = VALUE`` has blanks for the eye, and ``KEY=VALUE`` has none; nothing but text has blanks of its own."""
    for setting, value in (
        ("note= ", " "),
        ("note=\t", "\t"),
        ("note= a ", " a "),
        ("note = a ", "a"),
        ("note = ", " "),
    ):
        assert load(Config, None, config_overrides((setting,), {})).note == value
    for setting in ("steps= 7 ", "steps = 7", "steps=7"):
        assert load(Config, None, config_overrides((setting,), {})).steps == 7
    assert load(Config, None, config_overrides(("device= cuda",), {})).device is Device.CUDA


def test_every_key_of_a_run_says_what_it_is() -> None:
    assert [key.name for key in dotted_fields(TrainConfig) if not key.help] == []


def test_help_config_lists_every_key() -> None:
    result = run("--help-config")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "steps  (an integer; default 80)",
        "device  (one of cpu, cuda; default cpu)",
        "data  (a list, each text; default empty)",
        "note  (text, or none; default none)",
        "host.budget  (a size such as 512MiB, 4GB; default 256 MiB)",
        "    what experts may use",
    ]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Options of each type."""

    depth: int = option(0, "requests in flight")
    device: Device = option(Device.CPU, "Where.", "--on")
    record_bytes: tuple[int, ...] = option((), "of a record", size=True, multiple=True)
    budget: int = option(1 << 30, "of experts", size=True)
    blocks: tuple[int, ...] = option((), "first blocks")
    fast: bool = option(False, "Not slow.")
    store: Path | None = option(None, "Where.")
    name: str = option(help="of it")


def test_each_field_of_a_dataclass_is_an_option() -> None:
    seen: list[Load] = []

    @click.command()
    @dataclass_options(Load, "load")
    def command(load: Load) -> None:
        seen.append(load)

    def run(*args: str) -> Result:
        return CliRunner().invoke(command, ["--name", "n", *args])

    assert run().exit_code == 0
    assert (
        run("--on", "cuda", "--record-bytes", "4KiB", "--record-bytes", "1", "--budget", "2KiB").exit_code
        == 0
    )
    assert run("--blocks", "0", "--blocks", "8", "--fast", "--store", "s", "--depth", "3").exit_code == 0
    assert seen == [
        Load(name="n"),
        Load(name="n", device=Device.CUDA, record_bytes=(4096, 1), budget=2048),
        Load(name="n", blocks=(0, 8), fast=True, store=Path("s"), depth=3),
    ]
    shown = {param.opts[0]: (param.default, getattr(param, "help", None)) for param in command.params}
    assert shown["--depth"] == (0, "Requests in flight.")
    assert shown["--on"] == ("cpu", "Where.")
    assert shown["--budget"] == ("1GiB", "Of experts.")
    for args, named in (
        (["--blocks", "x"], "--blocks"),
        (["--on", "tpu"], "--on"),
        (["--budget", "much"], "--budget"),
    ):
        assert run(*args).exit_code == 2
        assert named in run(*args).stderr
    missing = CliRunner().invoke(command, [])
    assert missing.exit_code == 2
    assert "--name" in missing.stderr


def test_options_stand_for_keys_of_a_configuration() -> None:
    seen: list[dict[str, object]] = []
    table = {"--budget": "host.budget", "--data": "data", "--on": "device", "--steps": "steps"}

    @click.command()
    @config_options(Config, table)
    def elsewhere(given: dict[str, object]) -> None:
        seen.append(given)

    @click.command()
    @config_options(Config, table, Defaults.SHOWN)
    def shown(given: dict[str, object]) -> None:
        seen.append(given)

    for command, args in ((elsewhere, []), (elsewhere, ["--data=a", "--data=b", "--steps=0"]), (shown, [])):
        assert CliRunner().invoke(command, args).exit_code == 0
    assert seen == [
        {},
        {"data": ("a", "b"), "steps": 0},
        {"host.budget": 2**28, "device": Device.CPU, "steps": 80},
    ]
