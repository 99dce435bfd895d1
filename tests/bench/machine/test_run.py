"""A profile measured in a few seconds: whole, readable, and of use to a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierstore.bench.machine.run import MachineBench, measurements, rows, run
from tierstore.cli.main import cli
from tierstore.errors import ConfigError
from tierstore.machine_profile import Evidence, load_profile, save_profile


@pytest.mark.slow
def test_a_measured_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    bench = MachineBench(directory=tmp_path, repeats=1, disk_bytes=8 << 20, threads=1)
    found = run(bench, said.append)
    measured = found.profile
    assert measured.evidence is Evidence.MEASURED
    assert measured.process_bytes > 50 << 20
    assert len(said) == 4
    for name, cost, assumed in rows(found):
        assert cost.per_s > 0, name
        assert cost.latency_s >= 0, name
        assert assumed.per_s > 0, name
    listed = {one.key: one for one in measurements(found)}
    assert len({one.parameters["cost"] for one in listed.values() if one.name == "latency"}) == 13
    assert set(measured.exchanges) == {2}
    assert measured.expert_forward is not None
    assert measured.expert_backward is not None
    assert all(error >= 0 for error in found.error_ratios("all_to_all of 2"))
    copies = [one for one in listed.values() if one.name == "copy"]
    assert [one.parameters["bytes"] for one in copies] == [256 << 10, 1 << 20, 4 << 20, 16 << 20]
    assert not list(tmp_path.iterdir())  # what it measured with is gone
    path = tmp_path / "profile.json"
    save_profile(measured, path)
    assert load_profile(path) == measured
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--profile", str(path), "--memory", "4GiB", "--disk", "100GB", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["prediction"]["evidence"] == "measured"
    process = next(term for term in found["terms"] if term["name"] == "process")
    assert process["evidence"] == "measured"
    assert process["term_bytes"] == measured.process_bytes


@pytest.mark.parametrize("wrong", [{"ranks": 1}, {"repeats": 0}, {"disk_bytes": 1000}])
def test_bad_input(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "-")):
        MachineBench(**wrong)


def test_only_links_of_collectives_are_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "machine", str(tmp_path / "profile.json"), "--set", "links.disk.bandwidth=1MiB"])
    assert ended.value.code == 2
    assert "links.exchange" in capsys.readouterr().err
