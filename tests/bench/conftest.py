"""Fixtures: a benchmark's command at a tiny size, and files to read and write."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from io_jobs import MIB
from tiny import RefusedBench, TinyBench, TinyRun, bench_status, run_tiny

from tierstore.bench.io_load import FileSet, data_files


@pytest.fixture
def tiny_bench(tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]) -> TinyBench:
    """Runs ``tierstore bench NAME ARGUMENTS`` with --json and --save; see ``run_tiny``."""

    def run(name: str, *arguments: str | Path, status: int = 0) -> TinyRun:
        saved = tmp_path_factory.mktemp("saved") / "saved.json"
        return run_tiny(saved, capfd, name, *arguments, status=status)

    return run


@pytest.fixture
def refused_bench(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> RefusedBench:
    """Checks that ``tierstore bench ARGUMENTS`` is refused: one line with ``named``, exit status 2, and no file left.

    ``{here}`` in either is an empty directory, ``{name}`` its name.
    """

    def check(*arguments: str, named: str) -> None:
        places = {"here": tmp_path, "name": tmp_path.name}
        assert bench_status(*(argument.format(**places) for argument in arguments)) == 2
        err = capfd.readouterr().err
        (line,) = [line for line in err.splitlines() if line.startswith("tierstore: error")]
        assert named.format(**places) in line
        assert list(tmp_path.iterdir()) == []

    return check


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileSet]:
    """4 MiB in each of two directories; both are empty again afterwards."""
    places = [tmp_path_factory.mktemp(name) for name in "ab"]
    with data_files(places, 4 * MIB) as made:
        yield made
    assert [list(place.iterdir()) for place in places] == [[], []]
