"""Passes over a store: what each command shows of them, on a terminal and elsewhere, and what Ctrl-C leaves."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save
from command_line import done, tiny_run
from rich.console import Console

from tierstore.cli import output as output_module
from tierstore.cli.main import INTERRUPTED, cli

#: What is done of all, its rate, and while it goes on the time left.
COUNT = r"[\d.]+ [KM]?i?B/[\d.]+ [KM]?i?B"
DONE = rf"{COUNT}  [\d.]+ [KMG]?i?B/s"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained store ``s``, a checkpoint ``m``, and its import ``i``."""
    here = tmp_path_factory.mktemp("made")
    done("train", tiny_run(here, {"steps": 1}), "--store", here / "s")
    save(here / "m", "mixtral", torch.bfloat16)
    done("import", here / "m", "--store", here / "i")
    return here


#: By pass: the command in a directory of its own, from what was ``made``.
PASSES: dict[str, Callable[[Path, Path], list[object]]] = {
    "verify": lambda made, own: ["verify", made / "s"],
    "reshard": lambda made, own: ["reshard", made / "s", "--to", own / "new", "--ranks", 2],
    "import": lambda made, own: ["import", made / "m", "--store", own / "new"],
    "export": lambda made, own: ["export", made / "i", "--to", own / "new"],
    "checksum": lambda made, own: ["train", made / "run.toml", "--store", own / "new", "--checksum"],
    "fusion: export": lambda made, own: ["deploy", made / "i", "--to", own / "new", "--until", "fusion"],
    "fusion: import": lambda made, own: ["deploy", made / "i", "--to", own / "new", "--until", "fusion"],
    "fusion: checksum": lambda made, own: ["deploy", made / "i", "--to", own / "new", "--until", "fusion"],
}


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_has_a_first_line_and_its_rate(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --json all of it is on stderr, and there is a line for every update if the interval is none."""
    monkeypatch.setitem(output_module.ProgressBar.__init__.__kwdefaults__, "interval_s", 0.0)
    result = done(*PASSES[name](made, tmp_path), "--json")
    json.loads(result.stdout)
    lines = [line for line in result.stderr.splitlines() if line.startswith(f"{name} ")]
    assert lines[0] == f"{name} ..."
    assert all(re.fullmatch(rf"{name} ({COUNT}|{DONE}  .* left)", line) for line in lines[1:-1])
    assert any(line.endswith(" left") for line in lines[1:-1])
    assert re.fullmatch(rf"{name} {DONE}", lines[-1])
    moved, total = lines[-1].removeprefix(f"{name} ").split("  ")[0].split("/")
    assert moved == total


@pytest.mark.parametrize("name", PASSES)
def test_a_terminal_gets_a_bar_with_the_rate(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminal(**options: Any) -> Console:
        return Console(**options, force_terminal=True, width=200)

    monkeypatch.setattr(output_module, "Console", terminal)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", done(*PASSES[name](made, tmp_path)).stdout)
    assert re.search(rf"{name} ━+ ([\d.]+ \w+)/\1 \d:\d\d:\d\d +[\d.]+ \w+/s", shown)


@pytest.mark.parametrize("name", PASSES)
def test_what_ctrl_c_leaves_the_next_start_goes_on_with(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted halfway, and the same command again: the new store is whole, and so is the old one."""
    arguments = PASSES[name](made, tmp_path)
    counted = output_module.ProgressBar._counted

    def interrupting(bar: Any, step: int, total: int, now: float) -> list[str]:
        if bar._label == name and 0 < total <= 2 * step:
            raise KeyboardInterrupt
        return counted(bar, step, total, now)

    with monkeypatch.context() as patched:
        patched.setattr(output_module.ProgressBar, "_counted", interrupting)
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        assert ended.value.code == INTERRUPTED
    if name in ("reshard", "export"):
        assert list(tmp_path.iterdir()) == []
    if name == "checksum":  # it ended behind the last commit
        arguments = ["train", made / "run.toml", "--store", tmp_path / "new", "--resume"]
    done(*arguments)
    for store in (made / "s", made / "i", tmp_path / "new"):
        if (store / "extents").exists():
            done("verify", store)
