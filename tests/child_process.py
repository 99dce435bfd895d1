"""Python in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def run_python(
    code: str, *arguments: object, status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``code`` run to its end, with which it must exit with ``status``."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment
    )
    assert done.returncode == status, (done.returncode, done.stderr)
    return done


class Child(subprocess.Popen[str]):
    """Answers lines with lines."""

    def say(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def answer(self) -> str:
        return self.stdout.readline().strip()

    def ask(self, line: str = "go") -> str:
        self.say(line)
        return self.answer()


@contextmanager
def child(code: str, *arguments: object) -> Iterator[Child]:
    """One that lives until the end of the block."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with Child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
