"""tierstore verify, over a fake store."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tierstore.cli.main import cli
from tierstore.machine import MemoryAccount
from tierstore.store.verify import VerifyReport


class FakeVerifier:
    def __init__(self, failures: list[str]) -> None:
        account = MemoryAccount({"process": 1 << 20, "reads ahead": 3 << 20})
        self.report = VerifyReport(4, 12, 2, 3 * 2**20, failures, account=account)
        self.paths: list[Path] = []

    def __call__(
        self,
        directory: Path,
        /,
        *,
        progress: Callable[[int, int], None],
        announced: Callable[[MemoryAccount], None],
    ) -> VerifyReport:
        self.paths.append(directory)
        announced(self.report.account)
        for done in range(1, 5):
            progress(done, 4)
        return self.report


def run(monkeypatch: pytest.MonkeyPatch, verifier: FakeVerifier, *options: str) -> int:
    monkeypatch.setattr("tierstore.store.parameter_store.verify_all", verifier)
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "store", *options])
    return ended.value.code


def test_a_whole_store(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = FakeVerifier([])
    assert run(monkeypatch, verifier) == 0
    assert verifier.paths == [Path("store")]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "verify ..."
    assert lines[1] == "memory: 4 MiB: reads ahead 3 MiB, process 1 MiB"
    assert re.fullmatch(r"verify 4 B/4 B  .*/s", lines[2])
    assert lines[-2].startswith("store: 4 records, 12 sections, 2 snapshots; read 3 MiB in ")
    assert lines[-2].endswith("; all intact")
    assert lines[-1].startswith("memory: 4 MiB announced, ")


def test_a_corrupt_store(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [f"expert {n}: section exp_avg: extents/moments.ext: checksum" for n in range(25)]
    assert run(monkeypatch, FakeVerifier(failures), "--json") == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found.pop("elapsed_s") >= 0
    assert found.pop("peak_resident_bytes") > 0
    assert found.pop("memory")["announced_bytes"] == 4 << 20
    assert found == {
        "store": "store",
        "records": 4,
        "sections": 12,
        "snapshots": 2,
        "read_bytes": 3 * 2**20,
        "failures": failures,
        "drives": [],
    }
    assert f"corrupt: {failures[19]}" in err
    assert failures[20] not in err
    assert "and 5 more" in err
    assert "25 failures" in err
