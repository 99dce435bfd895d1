"""--save, --html and --compare of a benchmark, and what ``bench report`` and ``compare`` make of the files."""

import json
from pathlib import Path

import pytest
from tiny import bench_status

from tierstore.bench.documents import load_document


def commit(place: Path, *args: str) -> int:
    return bench_status(
        "commit", "--records=2", "--record-bytes=48KiB", "--rounds=4", f"--store={place / 'store'}", *args
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    assert commit(place, f"--save={place / 'commit.json'}") == 0
    return place / "commit.json"


def test_everything_is_saved(saved: Path) -> None:
    document = load_document(saved)
    assert document.bench == "commit"
    assert document.options["rounds"] == 4
    assert document.options["record_bytes"] == 48 << 10
    assert document.started <= document.ended
    assert document.machine.filesystem != "none"


def test_a_run_is_compared_and_reported(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert commit(tmp_path, f"--compare={saved}", f"--html={page}", "--json") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    found = json.loads(out)
    assert found["dirty_bytes"] == 2 * 48 * 1024
    rows = {row["measurement"]: row["verdict"] for row in found["compared"]["measurements"]}
    assert rows["dirty"] == "same"
    assert any(warning.startswith("other options: store") for warning in found["compared"]["warnings"])
    assert "new / old" in err
    assert "other options: store" in err
    assert "against an earlier run" in page.read_text()


def test_files_of_several_are_one_page(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = tmp_path / "cache.json"
    assert bench_status("cache", "--requests=2000", "--keys=100", "--repeats=2", f"--save={rates}") == 0
    page = tmp_path / "page.html"
    capsys.readouterr()
    assert bench_status("report", saved, rates, "--html", page, "--json") == 0
    assert json.loads(capsys.readouterr().out)["benches"] == ["commit", "cache"]
    assert "tierstore bench: commit, cache" in page.read_text()
    assert bench_status("compare", saved, saved, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["measurements"]
    assert {row["verdict"] for row in rows} == {"within noise", "same"}
    assert bench_status("compare", saved, rates) == 2
    assert "expected a document of bench cache to compare with, got one of commit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--save={place}/none/a.json", "--save: there is no directory"),
        ("--html={place}/none/a.html", "--html: there is no directory"),
        ("--compare={place}/none.json", "none.json: No such file"),
        ("--compare={place}/other.json", "other.json: not a benchmark's document"),
        ("--compare={place}/adamw.json", "adamw.json: expected a document of bench commit, got one of adamw"),
    ],
)
def test_what_could_not_be_reported_is_refused_before_the_work(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "adamw.json").write_text(saved.read_text().replace('"bench": "commit"', '"bench": "adamw"'))
    assert commit(tmp_path, option.format(place=tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out == ""  # no table: nothing was measured
    assert len(err.splitlines()) == 1
    assert said in err


def test_nothing_in_common_is_an_error_and_the_run_is_saved(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = json.loads(saved.read_text())
    for measurement in plain["measurements"]:
        measurement["name"] += " of old"
    old = tmp_path / "old.json"
    old.write_text(json.dumps(plain))
    assert commit(tmp_path, f"--compare={old}", f"--save={tmp_path / 'new.json'}", "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["bench"] == "commit"
    assert f"{old}: the two documents of bench commit have no measurement in common" in err
    assert load_document(tmp_path / "new.json").bench == "commit"
