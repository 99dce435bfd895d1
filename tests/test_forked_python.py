"""A forked process is what a new one would be, apart from its imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import ForkServer

#: Prints what a program sees of how it was started, and whether torch was there before.
PROGRAM = """
import os, sys
there = "torch" in sys.modules
print(sys.argv, os.getcwd(), os.environ["GIVEN"], os.getppid(), sorted(os.listdir("/proc/self/fd")), __name__)
print(there, file=sys.stderr)
sys.exit(int(sys.stdin.read()))
"""


def started(
    *arguments: str, given: str, directory: Path, said: str = "3"
) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"GIVEN": given}
    command = [sys.executable, *arguments, "one", "two"]
    return subprocess.run(
        command, cwd=directory, env=environ, input=said, capture_output=True, text=True, check=False
    )


def test_it_is_started_as_a_new_process_is(tmp_path: Path, fork_server: ForkServer) -> None:
    """Arguments, directory, environment, parent, descriptors, streams and exit status; a script, -c and -m."""
    (tmp_path / "program.py").write_text(PROGRAM)
    for arguments in (["program.py"], ["-c", PROGRAM], ["-u", "-c", PROGRAM]):
        new = started(*arguments, given="a = b", directory=tmp_path)
        with fork_server.forking():
            forked = started(*arguments, given="a = b", directory=tmp_path)
        assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
        assert (new.stderr, forked.stderr) == ("False\n", "True\n")
    with fork_server.forking():
        version = started("-m", "tierstore.cli.main", "--version", given="", directory=tmp_path)
    assert version.stdout.startswith("tierstore, version ")


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("raise ValueError('why')", 1, "ValueError: why\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, os; atexit.register(lambda: os.write(2, b'at exit\\n'))", 0, "at exit\n"),
    ],
)
@pytest.mark.usefixtures("forked_python")
def test_how_it_ends(program: str, status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == status
    assert done.stderr.endswith(said)


@pytest.mark.usefixtures("forked_python")
def test_what_it_starts_is_forked_and_its_child() -> None:
    inner = "import os, sys; print('torch' in sys.modules, os.getppid())"
    outer = f"import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, '-c', {inner!r}])"
    done = subprocess.run([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True, check=True)
    pid, there, parent = done.stdout.split()
    assert (there, parent) == ("True", pid)


@pytest.mark.usefixtures("forked_python")
def test_its_command_line_is_shown_and_signals_reach_it() -> None:
    program = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, "name"], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        shown = Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0").split("\0")
        process.terminate()
    assert shown == [sys.executable, "-c", program, "name"]
    assert process.returncode == -signal.SIGTERM


@pytest.mark.usefixtures("forked_python")
def test_libraries_that_would_be_loaded_otherwise_start_afresh() -> None:
    program = "import sys; print('torch' in sys.modules)"
    other = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=other, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "False\n"
