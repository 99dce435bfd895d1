"""bench machine: a profile measured in a few seconds, whole, readable, and of use to a plan."""

import json
from pathlib import Path

import pytest
from tiny import TinyBench

from tierstore.cli.main import cli
from tierstore.machine_profile import Evidence, load_profile

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path, tiny_bench: TinyBench, capfd: pytest.CaptureFixture[str]) -> None:
    path, place = tmp_path / "profile.json", tmp_path / "disk"
    place.mkdir()
    small = ["--repeats=1", "--threads=1", "--disk-bytes=8MiB", f"--dir={place}"]
    found = tiny_bench(
        "machine", path, *small, "--set", "model.d_ff=512", "--set", "model.compute_dtype=bf16"
    )
    profile = load_profile(path)
    assert profile.evidence is Evidence.MEASURED
    assert profile.machine.endswith("bf16 products of 256 x 512")
    assert profile.process_bytes > 50 << 20
    costs = {cost["cost"]: cost for cost in found.figures["costs"]}
    for cost in costs.values():
        assert cost["latency_s"] >= 0
        assert 0 <= cost["median_error_ratio"] <= cost["largest_error_ratio"]
        rate = cost.get("flops_per_s", cost.get("bytes_per_s"))
        assert rate is None or rate > 0  # null where points of this size take no time of their own
    listed = {one.key: one for one in found.document.measurements}
    assert {one.parameters["cost"] for one in listed.values() if one.name == "latency"} == set(costs)
    assert len(costs) == 13
    assert set(profile.exchanges) == {2}
    assert profile.expert_forward is not None
    assert profile.expert_backward is not None
    copies = [one for one in listed.values() if one.name == "copy"]
    assert [one.parameters["bytes"] for one in copies] == [256 << 10, 1 << 20, 4 << 20, 16 << 20]
    assert not list(place.iterdir())  # what it measured with is gone
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--profile", str(path), "--memory", "4GiB", "--disk", "100GB", "--json"])
    assert ended.value.code == 0
    planned = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert planned["prediction"]["evidence"] == "measured"
    process = next(term for term in planned["terms"] if term["name"] == "process")
    assert process["evidence"] == "measured"
    assert process["term_bytes"] == profile.process_bytes
