"""tierstore bench ring, end to end on tiny sizes. No test asserts a speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierstore.bench.results.document import load_document
from tierstore.cli.main import cli

TINY = ("--layers=5", "--experts=2", "--expert-bytes=8KiB", "--forward-ms=0.2", "--passes=1", "--rounds=2")


def bench(tmp_path: Path, *args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", "ring", f"--store={tmp_path / 'bench'}", *TINY, *args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_rings_in_turns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """2 and 4 of 5 layers, over a link that is limited and one that is not: an expert is two pages of 4 KiB."""
    saved, timeline = tmp_path / "saved.json", tmp_path / "t.json"
    rings = ("--share=0.4", "--share=0.8", "--load=0.9", "--json", f"--save={saved}")
    assert bench(tmp_path, *rings, f"--timeline={timeline}") == 0
    out, err = capfd.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert found["resident_device_bytes"] == 5 * 2 * 8192
    assert [
        (ring["layers_count"], ring["load_ratio"], ring["device_bytes"], ring["saved_ratio"])
        for ring in found["rings"]
    ] == [
        (2, 0.9, 4 * 8192, pytest.approx(0.6)),
        (4, 0.9, 8 * 8192, pytest.approx(0.2)),
        (2, None, 4 * 8192, pytest.approx(0.6)),
        (4, None, 8 * 8192, pytest.approx(0.2)),
    ]
    assert all(len(ring["pass_s"]) == len(ring["round_speed_ratio"]) == 2 for ring in found["rings"])
    assert "real copies" in err
    targets = [m for m in load_document(saved).measurements if m.target is not None]
    assert [(m.name, m.parameters["ring"], m.target) for m in targets] == [
        ("speed to everything resident", 2, 0.95)
    ]
    names = {event["name"] for event in json.loads(timeline.read_text()) if event["ph"] == "X"}
    assert {"group 0: layer 0", "group 1: layer 1", "experts of layer 4"} <= names
    assert not (tmp_path / "bench").exists()


def test_a_share_of_more_than_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--share=1.5") == 2
    assert "shares: expected parts between 0 and 1, got 1.5" in capfd.readouterr().err
