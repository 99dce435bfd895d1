"""The contract of the command line: exit statuses, one line on stderr, nothing imported early."""

import errno
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command_line import invoke

from tierstore import __version__, errors
from tierstore.cli.main import COMMANDS, LazyGroup, cli


def run(*args: str) -> tuple[int, str, str]:
    result = invoke(*args)
    return result.exit_code, result.stdout, result.stderr


def process(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_lists_the_table() -> None:
    status, out, _ = run("--help")
    assert status == 0
    for name, (_, summary) in COMMANDS.items():
        assert name in out
        assert summary.split()[0] in out


def test_version() -> None:
    assert run("--version") == (0, f"tierstore, version {__version__}\n", "")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_can_be_imported_and_has_help(name: str) -> None:
    status, out, _ = run(name, "--help")
    assert status == 0
    assert "Usage: tierstore" in out


@pytest.mark.parametrize("name", ["cache", "bench"])
def test_a_group_says_all_of_what_its_commands_do(name: str) -> None:
    status, out, _ = run(name, "--help")
    assert status == 0
    group = cli.get_command(click.Context(cli), name)
    words = " ".join(out.split())
    for command in group.commands.values():
        first = " ".join(command.help.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
        assert first in words


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["doctr"], "unknown command 'doctr'; expected one of"),
        (["cache", "simulat"], "unknown command 'simulat'; expected one of curve, import, record"),
        ([], "no command given; see tierstore --help"),
        (["--colour"], "No such option '--colour'"),
        (["verify"], "Missing argument 'STORE'"),
        (["doctor", "--capability", "warp=on"], "unknown name 'warp'; expected one of io_uring"),
        (["doctor", "--capability", "dax=sometimes"], "--capability dax: expected off, auto or on"),
        (["doctor", "--dir", "/no/such/place"], "/no/such/place: No such file or directory"),
        (["train", "--memory", "300MiB"], "memory: expected at least 346030080 bytes, got 314572800"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(args: list[str], said: str) -> None:
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert err.startswith("tierstore: error: ")
    assert said in err
    assert err.count("\n") == 1


def group_that_raises(error: BaseException) -> click.Command:
    @click.command(cls=LazyGroup, invoke_without_command=True)
    def group() -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (errors.ConfigError("run.toml: model.x: unknown"), 2, "run.toml: model.x: unknown"),
        (errors.DataError("a.txt: empty"), 2, "a.txt: empty"),
        (errors.BudgetError("at least 3 MiB"), 2, "at least 3 MiB"),
        (errors.CapabilityError("no"), 2, "no"),
        (errors.StoreInUseError("held by\nprocess 7"), 2, "held by process 7"),
        (errors.StoreMissingError(), 2, "StoreMissingError"),
        (errors.ChecksumError("expert 3 weight a.ext"), 1, "expert 3 weight a.ext"),
        (OSError(errno.ENOSPC, "No space left on device", "/s"), 2, "/s: No space left on device"),
        (OSError(errno.EXDEV, "Invalid link", "/a", None, "/b"), 2, "/a: /b: Invalid link"),
        (OSError("plain"), 2, "plain"),
    ],
)
def test_each_error_has_its_status(error: Exception, status: int, said: str) -> None:
    result = CliRunner().invoke(group_that_raises(error), [])
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr == f"tierstore: error: {said}\n"


def test_a_warning_is_one_line(tmp_path: Path) -> None:
    code = (
        "import warnings; from tierstore.cli import main; main.cli.main = lambda: warnings.warn('not\\nthe same');"
        "main.main()"
    )
    assert process(code, tmp_path).stderr == "tierstore: warning: not the same\n"


@pytest.mark.parametrize(
    ("command", "before", "after"),
    [
        ("train", None, "glibc.malloc.tcache_count=0"),
        ("train", "glibc.malloc.mxfast=64", "glibc.malloc.mxfast=64:glibc.malloc.tcache_count=0"),
        ("train", "glibc.malloc.tcache_count=3", "glibc.malloc.tcache_count=3"),
        ("generate", None, "None"),
        ("verify", None, "None"),
        ("--help", None, "None"),
    ],
)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator has this cache")
def test_commands_with_long_passes_run_without_the_thread_cache(
    command: str, before: str | None, after: str, tmp_path: Path
) -> None:
    code = (
        "import os, sys; from tierstore.cli import main;"
        "main.cli.main = lambda: print(os.environ.get('GLIBC_TUNABLES'), *sys.argv[1:]); main.main()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment["PYTHONHASHSEED"] = "1"  # a new process, and no fork of the tests' own
    if before is not None:
        environment["GLIBC_TUNABLES"] = before
    done = subprocess.run(
        [sys.executable, "-c", code, command, "a b", "--x"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{after} {command} a b --x\n"


def test_an_interrupt_is_130() -> None:
    assert CliRunner().invoke(group_that_raises(KeyboardInterrupt()), []).exit_code == 130


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    result = CliRunner().invoke(group_that_raises(KeyError("x")), [])
    assert isinstance(result.exception, KeyError)


@pytest.mark.parametrize(
    ("args", "policy"),
    [
        *(
            (args, "passive")
            for args in (
                *("--help", "--version", "verify --help", "doctor --help", "nonsense"),
                *("train --memory 300MiB", "import . --store s --memory 300MiB"),  # less than torch takes
            )
        ),
        *((args, "None") for args in ("generate --help", "serve --help", "serve . --memory 300MiB")),
    ],
)
def test_torch_is_not_imported_to_answer_and_openmp_spins_where_passes_are_short(
    args: str, policy: str, tmp_path: Path
) -> None:
    code = (
        "import sys, os\n"
        "os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from tierstore.cli.main import cli\n"
        "try:\n"
        f"    cli.main({args.split()!r})\n"
        "except SystemExit:\n"
        "    print('torch' in sys.modules, os.environ.get('OMP_WAIT_POLICY'))\n"
    )
    done = process(code, tmp_path)
    assert done.stdout.splitlines()[-1:] == [f"False {policy}"], done.stderr


def test_a_process_exits_with_the_status(tmp_path: Path) -> None:
    done = process("from tierstore.cli.main import main; main()", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tierstore: error: no command given; see tierstore --help\n"


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m tierstore.cli.main --help | true"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""


def test_the_exit_status_of_a_command_is_kept() -> None:
    def with_status(status: int) -> Callable[[], None]:
        return lambda: click.get_current_context().exit(status)

    for status in (0, 1):
        group = click.command(cls=LazyGroup, invoke_without_command=True)(with_status(status))
        assert CliRunner().invoke(group, []).exit_code == status
